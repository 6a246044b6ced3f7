"""One SHA-256 over everything that must be equal: the strongest statement that two states are the same, bit for bit.

The digest covers names, dtypes, shapes and raw bytes of tensors, and plain values with their types. It does not depend
on the device, on strides, on the order of a mapping's keys, or on the process: the same state gives the same digest
anywhere. Nothing is moved, changed or communicated; of a sharded tensor the local part counts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_CHUNK_BYTES = 64 << 20


def state_digest(*objects: nn.Module | Optimizer | Mapping[Any, Any] | torch.Tensor) -> str:
    """Return the digest of modules, optimizers, state dicts and tensors, in the order given.

    A module counts with its parameters and all its buffers (persistent or not) by name, and with its extra state;
    DDP's wrapper is looked through. An optimizer counts group by group, parameter by parameter: options, and state
    with its step counters. A list and a tuple of the same values are the same; 1, 1.0 and True are not.
    """
    sha = hashlib.sha256()
    for number, obj in enumerate(objects):
        _feed(sha, obj, f"object {number}")
    return sha.hexdigest()


def _feed(sha: Any, obj: Any, where: str) -> None:
    match obj:
        case nn.Module():
            _module(sha, obj, where)
        case Optimizer():
            _optimizer(sha, obj, where)
        case torch.Tensor():
            _tensor(sha, obj, where)
        case np.ndarray() | np.generic():
            _array(sha, np.asarray(obj), where)
        case Mapping():
            _mapping(sha, obj, where)
        case None:
            _piece(sha, "none", b"")
        case bool():
            _piece(sha, "bool", bytes([obj]))
        case int():
            _piece(sha, "int", str(int(obj)).encode())
        case float():
            _piece(sha, "float", _FLOAT.pack(obj))
        case complex():
            _piece(sha, "complex", _FLOAT.pack(obj.real) + _FLOAT.pack(obj.imag))
        case str():
            _piece(sha, "str", obj.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray():
            _piece(sha, "bytes", bytes(obj))
        case torch.dtype() | torch.device():
            _piece(sha, "torch", str(obj).encode())
        case Set():
            _piece(sha, "set", b"".join(sorted(_alone(item, where) for item in obj)))
        case Sequence():
            _piece(sha, "sequence", _LENGTH.pack(len(obj)))
            for number, item in enumerate(obj):
                _feed(sha, item, f"{where}[{number}]")
        case _:
            raise ValueError(
                f"{where} is a {type(obj).__module__}.{type(obj).__qualname__}: a digest covers modules, optimizers, "
                "tensors and plain values; leave it out, or give its state_dict()"
            )


def _piece(sha: Any, kind: str, raw: bytes) -> None:
    # kind and length before the bytes: two different states must not run together to the same bytes
    sha.update(kind.encode() + b":" + _LENGTH.pack(len(raw)))
    sha.update(raw)


def _alone(obj: Any, where: str) -> bytes:
    sha = hashlib.sha256()
    _feed(sha, obj, where)
    return sha.digest()


def _mapping(sha: Any, obj: Mapping[Any, Any], where: str) -> None:
    _piece(sha, "mapping", _LENGTH.pack(len(obj)))
    for key_digest, key in sorted(((_alone(key, f"a key of {where}"), key) for key in obj), key=lambda pair: pair[0]):
        _piece(sha, "key", key_digest)
        _feed(sha, obj[key], f"{where}[{key!r}]")


def _module(sha: Any, module: nn.Module, where: str) -> None:
    while isinstance(module, DistributedDataParallel):
        module = module.module
    parts: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    parts.update(module.named_buffers(remove_duplicate=False))
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            parts[f"{name}:extra_state"] = part.get_extra_state()
    _piece(sha, "module", b"")
    _mapping(sha, parts, where)


def _optimizer(sha: Any, optimizer: Optimizer, where: str) -> None:
    groups = optimizer.param_groups
    inner = getattr(optimizer, "optim", None)  # a ZeroRedundancyOptimizer keeps this rank's part of the state there
    state = inner.state if isinstance(inner, Optimizer) else optimizer.state
    _piece(sha, "optimizer", _LENGTH.pack(len(groups)))
    for number, group in enumerate(groups):
        place = f"{where}, param_groups[{number}]"
        _mapping(sha, {name: value for name, value in group.items() if name != "params"}, place)
        _piece(sha, "params", _LENGTH.pack(len(group["params"])))
        for index, param in enumerate(group["params"]):
            _feed(sha, state.get(param, {}), f"{place}, state of parameter {index}")


def _tensor(sha: Any, tensor: torch.Tensor, where: str) -> None:
    # a DTensor, known by its method: importing its module takes two seconds
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"{where} is a sparse, nested, quantized or meta tensor: a digest needs plain bytes")
    _piece(sha, "tensor", f"{tensor.dtype} {list(tensor.shape)}".encode())
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    # a piece at a time: no second copy of a large tensor on the host
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        sha.update(flat[start : start + _CHUNK_BYTES].cpu().numpy())


def _array(sha: Any, array: np.ndarray[Any, Any], where: str) -> None:
    if array.dtype.hasobject:
        raise ValueError(f"{where} is a numpy array of objects: a digest needs plain bytes")
    _piece(sha, "array", f"{array.dtype.str} {list(array.shape)}".encode())
    _piece(sha, "bytes", array.tobytes())
