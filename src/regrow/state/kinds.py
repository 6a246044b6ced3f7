"""What plain state may consist of, and what to tell a user whose state is not plain. Pure; nothing is encoded here."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 100
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)

KINDS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, defaultdict),
        *(torch.Size, torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter, np.ndarray),
    }
)
"""The exact types that are kept, besides numpy's scalars."""

FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "set": set,
    "str": str,
    "bool": bool,
    "tuple": tuple,
}
FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


def check(obj: Any, where: str) -> None:
    """Raise ``ValueError`` for the first thing in ``obj`` that cannot be encoded: its place, its type, the remedy."""
    why = _find(obj, where, 0)
    if why is not None:
        raise ValueError(why)


def _find(obj: Any, where: str, depth: int) -> str | None:
    why = _why_not(obj, depth)
    if why is not None:
        return f"{where} is {why}"
    if isinstance(obj, dict):
        for key, value in obj.items():
            why = _find(key, f"the key {key!r} of {where}", depth + 1) or _find(value, f"{where}[{key!r}]", depth + 1)
            if why is not None:
                return why
    elif isinstance(obj, (list, tuple, deque, set, frozenset)):
        for number, item in enumerate(obj):
            place = f"an element of {where}" if isinstance(obj, (set, frozenset)) else f"{where}[{number}]"
            why = _find(item, place, depth + 1)
            if why is not None:
                return why
    return None


def _why_not(obj: Any, depth: int) -> str | None:
    """What is wrong with this object itself, and the remedy."""
    kind = type(obj)
    if isinstance(obj, np.ndarray | np.generic) and kind in (np.ndarray, type(np.asarray(obj)[()])):
        return why_not_array(np.asarray(obj))
    if kind in (torch.Tensor, torch.nn.Parameter):
        return why_not_tensor(obj)
    if kind is defaultdict and obj.default_factory not in FACTORY_NAMES:
        return f"a defaultdict of {obj.default_factory!r}: use a plain dict, or a builtin type as its factory"
    if kind in KINDS:
        deep = isinstance(obj, _CONTAINERS) and depth >= MAX_DEPTH
        return f"nested {depth} deep: does it contain itself?" if deep else None
    name = f"a {kind.__module__}.{kind.__qualname__}"
    if isinstance(obj, enum.Enum):
        return f"{name}: keep its .value (or .name) instead"
    if isinstance(obj, torch.Tensor):
        return f"{name}, a subclass of Tensor: keep a plain tensor (for a DTensor, .to_local())"
    if callable(obj):
        return f"{name}, which is code: leave it out of state_dict() and set it again when the object is made"
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return f"{name}: keep tuple(...) or ._asdict() of it"
    base = next((base for base in kind.__mro__[1:] if base in KINDS), None)
    if base is not None:
        return f"{name}, a subclass of {base.__name__}: keep a plain {base.__name__}"
    return f"{name}: state_dict() must give numbers, strings, tensors, and lists or dicts of them"


def why_not_tensor(obj: torch.Tensor) -> str | None:
    """What is wrong with a plain tensor or parameter; None if it can be kept."""
    if obj.layout is not torch.strided or obj.is_nested:
        return f"a tensor of layout {obj.layout}: keep .to_dense(), or its parts"
    if obj.is_quantized:
        return "a quantized tensor: keep .int_repr() and its scale"
    if obj.is_meta:
        return "a tensor without data (device 'meta'): materialise it first"
    return None


def why_not_array(obj: np.ndarray[Any, Any]) -> str | None:
    """What is wrong with an array or a numpy scalar; None if it can be kept."""
    if obj.dtype.hasobject or obj.dtype.fields is not None or np.dtype(obj.dtype.str) != obj.dtype:
        return f"a numpy array of {obj.dtype}: keep an array of numbers, or a list"
    return None
