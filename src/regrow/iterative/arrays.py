"""The few things that are done with arrays of numpy and tensors of torch alike. Each is computed where the array lives.

torch is not imported here: whoever has a tensor has imported it already, and whoever has not need not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "NDArray[Any] | torch.Tensor"
Value: TypeAlias = "Array | Sequence[Array]"


def arrays_of(value: Value, where: str) -> tuple[Array, ...]:
    """Return a block's value as a tuple of arrays; the first is the one that distances are of."""
    found = (value,) if isinstance(value, np.ndarray) or _is_tensor(value) else tuple(value)
    if not found:
        raise ValueError(f"{where} has no arrays: a block needs at least one")
    for array in found:
        if isinstance(array, np.ndarray):
            if array.dtype.hasobject:
                raise ValueError(f"{where} has a numpy array of objects: only plain numbers can be saved")
        elif not _is_tensor(array):
            raise ValueError(f"{where} has a {type(array).__name__}: give numpy arrays or torch tensors")
    return found


def copy(array: Array) -> Array:
    """Return a copy on the same device."""
    return array.copy() if isinstance(array, np.ndarray) else array.detach().clone()


def fill(target: Array, source: Array) -> None:
    """Write values into an array of the same shape, wherever the two live."""
    if tuple(target.shape) != tuple(source.shape):
        raise ValueError(f"values of shape {tuple(source.shape)} do not fit an array of {tuple(target.shape)}")
    if isinstance(target, np.ndarray):
        target[...] = source if isinstance(source, np.ndarray) else source.detach().cpu().numpy()
    else:
        target.detach().copy_(_tensor_of(source))


def alike(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Whether two values have arrays of the same kinds, types and shapes."""
    return len(first) == len(second) and all(
        type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape for a, b in zip(first, second, strict=True)
    )


def distances(pairs: Sequence[tuple[Array, Array]]) -> list[float]:
    """Return the Euclidean distance of each pair. What devices compute is fetched from them at once, not singly."""
    return _floats([_norm(_difference(a, b)) for a, b in pairs])


def norms(arrays: Sequence[Array]) -> list[float]:
    """Return the Euclidean norm of each array."""
    return _floats([_norm(array) for array in arrays])


def _difference(a: Array, b: Array) -> Array:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.subtract(a, b, dtype=np.float64) if a.dtype.kind in "bui" else np.subtract(a, b)
    a, b = _tensor_of(a).detach(), _tensor_of(b).detach()
    return a - b if a.is_floating_point() or a.is_complex() else a.double() - b.double()


def _norm(array: Array) -> Any:
    if isinstance(array, np.ndarray):
        flat = array.ravel()
        if flat.dtype.kind not in "fc" or flat.dtype.itemsize < 4:
            flat = flat.astype(np.float64)
        return math.sqrt(float(np.vdot(flat, flat).real))
    tensor = array.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    return tensor.float().norm() if tensor.element_size() < 4 else tensor.norm()  # 16 bits overflow at once


def _floats(results: list[Any]) -> list[float]:
    tensors: dict[Any, list[int]] = {}
    for number, result in enumerate(results):
        if not isinstance(result, float):
            tensors.setdefault((result.device, result.dtype), []).append(number)
    for numbers in tensors.values():
        first = results[numbers[0]]
        together = first.new_empty(len(numbers))
        for at, number in enumerate(numbers):
            together[at] = results[number]
        for number, value in zip(numbers, together.tolist(), strict=True):
            results[number] = value
    return results


def describe(array: Array) -> list[Any]:
    """Return what is needed to make an array of bytes again: kind, type and shape."""
    if isinstance(array, np.ndarray):
        return ["numpy", array.dtype.str, list(array.shape)]
    return ["torch", str(array.dtype).removeprefix("torch."), list(array.shape)]


def bytes_of(array: Array) -> memoryview:
    """Return an array's bytes, in its own memory where they lie there in order."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    import torch

    flat = array.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def from_bytes(description: Sequence[Any], memory: bytearray) -> Array:
    """Return the array that these bytes are; it owns them."""
    kind, dtype, shape = description
    if kind == "numpy":
        return np.ndarray(shape, np.dtype(dtype), buffer=memory if memory else None)
    import torch

    if not memory:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def _tensor_of(array: Array) -> torch.Tensor:
    if isinstance(array, np.ndarray):
        import torch

        return torch.from_numpy(np.ascontiguousarray(array))
    return array


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "__torch_function__")
