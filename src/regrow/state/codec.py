"""Plain state to bytes and back, without pickle: what ``state_dict()`` gives, with its types kept exactly.

A record is a header (magic, version, length), a tree of tagged values, and a CRC-32 of all that. Reading one never runs
code that came with it; a record that is cut, flipped or of another version is a ``ValueError``.

Kept exactly: None, bool, int, float (every bit), complex, str, bytes, bytearray, list, tuple, dict (order, and keys of
any kind listed here), OrderedDict, defaultdict (of a builtin type), Counter, deque, set, frozenset, torch.Size,
torch.dtype, torch.device, tensors and parameters, numpy scalars and arrays. Subclasses of these are refused, not
flattened. Not kept: that two names share one tensor's memory, strides, and the autograd graph (``requires_grad`` is
kept).
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from regrow.state.kinds import FACTORIES, FACTORY_NAMES, MAX_DEPTH, check, why_not_array, why_not_tensor

__all__ = ["check", "decode", "encode", "origin"]

MAGIC = b"RGst"
VERSION = 1

_HEADER = struct.Struct("<4sHxxQ")
_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<cI")
_INT = struct.Struct("<cq")
_FLOAT = struct.Struct("<cd")
_COMPLEX = struct.Struct("<cdd")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_FF64 = struct.Struct("<dd")
_U64 = struct.Struct("<Q")

_REQUIRES_GRAD, _PARAMETER = 1, 2

_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if type(kind) is torch.dtype}
_DTYPE_NAMES = {kind: name for name, kind in _DTYPES.items()}

Write = Callable[[bytes], None]


class _Unencodable(Exception):
    """Internal: ``encode`` met something that ``check`` will name."""


def encode(obj: Any) -> bytes:
    """Return the record of ``obj``; ``ValueError`` names the place of the first thing that cannot be kept."""
    parts: list[bytes] = [b""]
    try:
        _put(obj, parts.append, 0)
    except _Unencodable:
        check(obj, "state")
        raise AssertionError("check() accepts what encode() does not") from None
    parts[0] = _HEADER.pack(MAGIC, VERSION, sum(map(len, parts)))
    record = b"".join(parts)
    return record + _CRC.pack(zlib.crc32(record))


def _put(obj: Any, write: Write, depth: int) -> None:
    _PUT.get(type(obj), _put_other)(obj, write, depth)


def _put_other(obj: Any, write: Write, depth: int) -> None:
    if not isinstance(obj, np.generic):
        raise _Unencodable
    array: np.ndarray[Any, Any] = np.asarray(obj)
    again: Any = array[()]
    if type(again) is not type(obj):  # a user's subclass of a numpy scalar
        raise _Unencodable
    _put_numpy(b"g", array, write)


def _put_int(obj: int, write: Write, depth: int) -> None:
    try:
        write(_INT.pack(b"i", obj))
    except struct.error:
        digits = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        write(_COUNT.pack(b"I", len(digits)) + digits)


def _put_text(tag: bytes, text: str, write: Write) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    write(_COUNT.pack(tag, len(raw)) + raw)


def _put_str(obj: str, write: Write, depth: int) -> None:
    _put_text(b"s", obj, write)


# a state's keys are the same at every step
@lru_cache(maxsize=4096)
def _key(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return _COUNT.pack(b"s", len(raw)) + raw


def _put_items(tag: bytes) -> Callable[[Any, Write, int], None]:
    def put(obj: Any, write: Write, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise _Unencodable
        write(_COUNT.pack(tag, len(obj)))
        for item in obj:
            _PUT.get(type(item), _put_other)(item, write, depth + 1)

    return put


def _put_pairs(tag: bytes) -> Callable[[Any, Write, int], None]:
    def put(obj: Any, write: Write, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise _Unencodable
        write(_COUNT.pack(tag, len(obj)))
        for key, value in obj.items():
            if type(key) is str:
                write(_key(key))
            else:
                _put(key, write, depth + 1)
            _PUT.get(type(value), _put_other)(value, write, depth + 1)

    return put


_put_defaultdict_pairs, _put_deque_items = _put_pairs(b"V"), _put_items(b"Q")


def _put_defaultdict(obj: defaultdict[Any, Any], write: Write, depth: int) -> None:
    if obj.default_factory not in FACTORY_NAMES:
        raise _Unencodable
    _put_defaultdict_pairs(obj, write, depth)
    _put_str(FACTORY_NAMES[obj.default_factory], write, depth)


def _put_deque(obj: deque[Any], write: Write, depth: int) -> None:
    _put_deque_items(obj, write, depth)
    _put(obj.maxlen, write, depth)


def _put_tensor(obj: torch.Tensor, write: Write, depth: int) -> None:
    if why_not_tensor(obj) is not None:
        raise _Unencodable
    flags = _REQUIRES_GRAD * obj.requires_grad | _PARAMETER * (type(obj) is torch.nn.Parameter)
    device = "" if obj.is_cpu else str(obj.device)
    shape = ",".join(map(str, obj.shape))
    flat = obj
    if not (obj.is_cpu and obj.is_contiguous() and not obj.is_conj() and not obj.is_neg()):
        flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = ctypes.string_at(flat.data_ptr(), flat.nbytes)  # numpy has no bfloat16, and this is the fastest way
    _put_text(b"t", f"{flags} {_DTYPE_NAMES[obj.dtype]} {shape} {device}", write)
    write(_U64.pack(len(raw)))
    write(raw)


def _put_numpy(tag: bytes, obj: np.ndarray[Any, Any], write: Write) -> None:
    if why_not_array(obj) is not None:
        raise _Unencodable
    _put_text(tag, f"{obj.dtype.str} {','.join(map(str, obj.shape))}", write)
    raw = obj.tobytes()
    write(_U64.pack(len(raw)) + raw)


_PUT: dict[type, Callable[[Any, Write, int], None]] = {
    type(None): lambda obj, write, depth: write(b"N"),
    bool: lambda obj, write, depth: write(b"T" if obj else b"F"),
    int: _put_int,
    float: lambda obj, write, depth: write(_FLOAT.pack(b"f", obj)),
    complex: lambda obj, write, depth: write(_COMPLEX.pack(b"c", obj.real, obj.imag)),
    str: _put_str,
    bytes: lambda obj, write, depth: write(_COUNT.pack(b"b", len(obj)) + obj),
    bytearray: lambda obj, write, depth: write(_COUNT.pack(b"B", len(obj)) + bytes(obj)),
    list: _put_items(b"l"),
    tuple: _put_items(b"u"),
    set: _put_items(b"e"),
    frozenset: _put_items(b"E"),
    torch.Size: _put_items(b"z"),
    dict: _put_pairs(b"d"),
    OrderedDict: _put_pairs(b"o"),
    Counter: _put_pairs(b"C"),
    defaultdict: _put_defaultdict,
    deque: _put_deque,
    torch.Tensor: _put_tensor,
    torch.nn.Parameter: _put_tensor,
    torch.dtype: lambda obj, write, depth: _put_text(b"y", _DTYPE_NAMES[obj], write),
    torch.device: lambda obj, write, depth: _put_text(b"v", str(obj), write),
    np.ndarray: lambda obj, write, depth: _put_numpy(b"a", obj, write),
}


def decode(record: bytes | bytearray | memoryview) -> Any:
    """Return what was encoded. Tensors own their memory and are on the CPU (``origin`` tells where they were)."""
    record = bytes(record)
    if len(record) < _HEADER.size + _CRC.size:
        raise ValueError(f"a state record of {len(record)} bytes: cut off, or not one")
    magic, version, length = _HEADER.unpack_from(record)
    if magic != MAGIC:
        raise ValueError(f"not a state record: it begins with {magic!r}")
    if version != VERSION:
        raise ValueError(f"a state record of version {version}; this is version {VERSION}")
    end = _HEADER.size + length
    if len(record) != end + _CRC.size:
        raise ValueError(f"a state record of {length} bytes holds {len(record) - _HEADER.size - _CRC.size}: cut off?")
    if zlib.crc32(memoryview(record)[:end]) != _CRC.unpack_from(record, end)[0]:
        raise ValueError("the checksum of the state record is wrong: it was damaged on the way")
    try:
        obj, at = _get(record, _HEADER.size)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, struct.error) as error:
        raise ValueError(f"malformed state record: {error}") from error
    if at != end:
        raise ValueError(f"malformed state record: its values end at byte {at}, not {end}")
    return obj


def origin(tensor: torch.Tensor) -> torch.device:
    """Return the device that a decoded tensor was on when it was encoded."""
    return getattr(tensor, "_regrow_origin", tensor.device)


Got = tuple[Any, int]


def _get(data: bytes, at: int) -> Got:
    return _GET[data[at]](data, at + 1)


def _get_raw(data: bytes, at: int) -> tuple[bytes, int]:
    start = at + 4
    end = start + _U32.unpack_from(data, at)[0]
    return data[start:end], end


def _get_str(data: bytes, at: int) -> tuple[str, int]:
    start = at + 4
    end = start + _U32.unpack_from(data, at)[0]
    return data[start:end].decode("utf-8", "surrogatepass"), end


def _get_int(data: bytes, at: int) -> Got:
    return _I64.unpack_from(data, at)[0], at + 8


def _get_long(data: bytes, at: int) -> Got:
    raw, at = _get_raw(data, at)
    return int.from_bytes(raw, "little", signed=True), at


def _get_float(data: bytes, at: int) -> Got:
    return _F64.unpack_from(data, at)[0], at + 8


def _get_complex(data: bytes, at: int) -> Got:
    return complex(*_FF64.unpack_from(data, at)), at + 16


def _get_bytearray(data: bytes, at: int) -> Got:
    raw, at = _get_raw(data, at)
    return bytearray(raw), at


def _get_list(data: bytes, at: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    count, at = _U32.unpack_from(data, at)[0], at + 4
    for _ in range(count):
        item, at = _GET[data[at]](data, at + 1)
        items.append(item)
    return items, at


def _get_of(make: Callable[[list[Any]], Any]) -> Callable[[bytes, int], Got]:
    def get(data: bytes, at: int) -> Got:
        items, at = _get_list(data, at)
        return make(items), at

    return get


def _get_dict_into(make: Callable[[], dict[Any, Any]]) -> Callable[[bytes, int], Got]:
    def get(data: bytes, at: int) -> Got:
        obj = make()
        count, at = _U32.unpack_from(data, at)[0], at + 4
        for _ in range(count):
            key, at = _GET[data[at]](data, at + 1)
            obj[key], at = _GET[data[at]](data, at + 1)
        return obj, at

    return get


_get_defaultdict_pairs = _get_dict_into(lambda: defaultdict(None))


def _get_defaultdict(data: bytes, at: int) -> Got:
    obj, at = _get_defaultdict_pairs(data, at)
    name, at = _get(data, at)
    obj.default_factory = FACTORIES[name]
    return obj, at


def _get_deque(data: bytes, at: int) -> Got:
    items, at = _get_list(data, at)
    maxlen, at = _get(data, at)
    return deque(items, maxlen), at


def _get_dtype(data: bytes, at: int) -> Got:
    name, at = _get_str(data, at)
    return _DTYPES[name], at


def _get_device(data: bytes, at: int) -> Got:
    name, at = _get_str(data, at)
    return torch.device(name), at


def _get_memory(data: bytes, at: int) -> tuple[bytearray, int]:
    start = at + 8
    end = start + _U64.unpack_from(data, at)[0]
    return bytearray(memoryview(data)[start:end]), end


def _shape(text: str) -> list[int]:
    return [int(size) for size in text.split(",")] if text else []


def _get_tensor(data: bytes, at: int) -> Got:
    text, at = _get_str(data, at)
    flags, dtype_name, shape, device = text.split(" ")
    memory, at = _get_memory(data, at)
    dtype = _DTYPES[dtype_name]
    tensor = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
    if dtype is not torch.uint8:
        tensor = tensor.view(dtype)
    tensor = tensor.reshape(_shape(shape))
    requires_grad = bool(int(flags) & _REQUIRES_GRAD)
    if int(flags) & _PARAMETER:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_(True)
    if device:
        tensor._regrow_origin = torch.device(device)  # type: ignore[attr-defined]
    return tensor, at


def _get_array(data: bytes, at: int) -> Got:
    text, at = _get_str(data, at)
    dtype, shape = text.rsplit(" ", 1)
    memory, at = _get_memory(data, at)
    return np.ndarray(_shape(shape), np.dtype(dtype), buffer=memory if memory else None), at


def _get_scalar(data: bytes, at: int) -> Got:
    array, at = _get_array(data, at)
    return array[()], at


_GET: dict[int, Callable[[bytes, int], Got]] = {
    ord(tag): get
    for tag, get in {
        "N": lambda data, at: (None, at),
        "T": lambda data, at: (True, at),
        "F": lambda data, at: (False, at),
        "i": _get_int,
        "I": _get_long,
        "f": _get_float,
        "c": _get_complex,
        "s": _get_str,
        "b": _get_raw,
        "B": _get_bytearray,
        "l": _get_list,
        "u": _get_of(tuple),
        "e": _get_of(set),
        "E": _get_of(frozenset),
        "z": _get_of(torch.Size),
        "d": _get_dict_into(dict),
        "o": _get_dict_into(OrderedDict),
        "C": _get_dict_into(Counter),
        "V": _get_defaultdict,
        "Q": _get_deque,
        "t": _get_tensor,
        "y": _get_dtype,
        "v": _get_device,
        "a": _get_array,
        "g": _get_scalar,
    }.items()
}
