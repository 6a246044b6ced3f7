"""The codec: what comes back is what went in, type by type and bit by bit; a damaged record is never read."""

from __future__ import annotations

import contextlib
import enum
import math
import random
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.state import codec
from regrow.state.codec import check, decode, encode, origin


def alike(left: Any, right: Any) -> bool:
    """Equal in value, exact type, order and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, left.requires_grad) == (
            right.dtype,
            right.shape,
            right.requires_grad,
        ) and encode(left) == encode(right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return alike(left.real, right.real) and alike(left.imag, right.imag)
    if isinstance(left, defaultdict) and left.default_factory is not right.default_factory:
        return False
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(alike(a, c) and alike(b, d) for (a, b), (c, d) in pairs)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(alike, left, right))
    return bool(left == right)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=4
        )
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(plain)
@settings(max_examples=300, deadline=None)
def test_plain_values_come_back(obj: Any) -> None:
    check(obj, "state")
    assert alike(decode(encode(obj)), obj)


@pytest.mark.parametrize(
    "obj",
    [
        -0.0, math.nan, -math.nan, math.inf, struct.unpack("d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0],
        2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**400, -(10**400), "\ud800 lone", b"", bytearray(b"xy"),
        complex(-0.0, math.nan),
        [], (), {}, set(), frozenset(), ((),), {1: {2: {3: [4]}}}, {True: 1, "1": 2, 2: 3, (1, 2): 4, None: 5, b"k": 6},
        {"b": 1, "a": 2}, OrderedDict(b=1, a=2), Counter("hello"), deque([1, 2]), deque([1, 2], maxlen=2),
        defaultdict(None, a=1), defaultdict(list, a=[1]), defaultdict(dict), defaultdict(int), defaultdict(float),
        defaultdict(set),
        torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"),
        np.float32(1.5), np.float64(math.nan), np.int8(-1), np.bool_(True), np.str_("word"), np.complex64(1j),
        np.datetime64("2024-01-01"),
        np.arange(6).reshape(2, 3), np.array(3.0), np.zeros((0, 4)), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array(["a", "bcd"]), np.array([True, False]), np.arange(8)[::2],
    ],
    ids=lambda obj: f"{type(obj).__name__}-{str(obj)[:16]}",
)  # fmt: skip
def test_each_kind_comes_back(obj: Any) -> None:
    check(obj, "state")
    assert alike(decode(encode(obj)), obj)
    assert alike(decode(encode({"x": [obj]})), {"x": [obj]})


DTYPES = sorted({kind for kind in vars(torch).values() if type(kind) is torch.dtype and "q" not in str(kind)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_any_dtype_come_back(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    for tensor in (raw.view(dtype).reshape(2, 3), raw.view(dtype)[3:], raw.view(dtype)[1], raw.view(dtype)[:0]):
        back = decode(encode(tensor))
        assert alike(back, tensor)
        assert back.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_tensors_of_any_layout_come_back_dense() -> None:
    matrix = torch.randn(3, 4)
    conj = torch.randn(3, dtype=torch.complex64).conj()
    for tensor in (matrix.t(), matrix[:, ::2], matrix[1:], torch.ones(1).expand(4), conj, conj.imag, torch.empty(0, 3)):
        back = decode(encode(tensor))
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


def test_tensors_own_their_memory() -> None:
    source = torch.zeros(4)
    record = encode(source)
    source += 1
    first, second = decode(record), decode(record)
    first += 5
    assert second.tolist() == [0, 0, 0, 0]
    array = decode(encode(np.zeros(2)))
    array += 1
    assert array.tolist() == [1, 1]


def test_requires_grad_and_parameters_are_kept() -> None:
    leaf = torch.ones(2, requires_grad=True)
    back = decode(encode([leaf, leaf * 2, torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), False)]))
    assert [tensor.requires_grad for tensor in back] == [True, True, True, False]
    assert [type(tensor) for tensor in back] == [torch.Tensor] * 2 + [torch.nn.Parameter] * 2
    assert all(tensor.is_leaf for tensor in back)


def test_the_device_is_noted() -> None:
    assert origin(decode(encode(torch.ones(2)))) == torch.device("cpu")
    text = b"0 float32 2 "  # what a tensor of a GPU differs in is this text: a machine without one can still read it
    record = encode(torch.ones(2))
    body = record[codec._HEADER.size : -4].replace(
        codec._COUNT.pack(b"t", len(text)) + text, codec._COUNT.pack(b"t", len(text) + 6) + text + b"cuda:1"
    )
    back = decode(sealed(body))
    assert back.device == torch.device("cpu")
    assert back.tolist() == [1, 1]
    assert origin(back) == torch.device("cuda:1")


def sealed(body: bytes) -> bytes:
    record = codec._HEADER.pack(codec.MAGIC, codec.VERSION, len(body)) + body
    return record + struct.pack("<I", zlib.crc32(record))


def test_states_of_real_training_objects_come_back() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedules = torch.optim.lr_scheduler
    states = [
        net.state_dict(), optimizer.state_dict(), torch.amp.GradScaler("cpu").state_dict(), torch.get_rng_state(),
        random.getstate(), np.random.get_state(), np.random.get_state(legacy=False),
        np.random.default_rng(0).bit_generator.state,
        *(schedule.state_dict() for schedule in (
            schedules.CosineAnnealingLR(optimizer, 100), schedules.OneCycleLR(optimizer, 0.1, 100),
            schedules.LambdaLR(optimizer, lambda epoch: 1.0), schedules.ReduceLROnPlateau(optimizer),
            schedules.MultiStepLR(optimizer, [3, 5]), schedules.CosineAnnealingWarmRestarts(optimizer, 10),
            schedules.SequentialLR(optimizer, [schedules.ConstantLR(optimizer), schedules.LinearLR(optimizer)], [4]),
        )),
    ]  # fmt: skip
    for state in states:
        check(state, "state")
        assert alike(decode(encode(state)), state)


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class MyDict(dict[str, int]):
    pass


class MyTensor(torch.Tensor):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("obj", "told"),
    [
        (Colour.RED, r"Colour: keep its \.value"),
        (Number.ONE, r"Number: keep its \.value"),
        (Point(1, 2), r"Point: keep tuple"),
        (MyDict(), "MyDict, a subclass of dict: keep a plain dict"),
        (print, "code: leave it out"),
        (torch.nn.Linear(1, 1), "leave it out"),
        (object(), "must give numbers, strings, tensors"),
        (defaultdict(lambda: 0), "a defaultdict of"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.empty(2, device="meta"), "without data"),
        (torch.ones(2).as_subclass(MyTensor), "a subclass of Tensor"),
        (np.array([object()]), "numpy array of object"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy array of"),
        (range(3), "builtins.range"),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_cannot_be_kept_is_named_with_its_place(obj: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"^protect\(sched=\)\['a'\]\[1\] is .*" + told):
        check({"z": 1, "a": [0, obj]}, "protect(sched=)")
    with pytest.raises(ValueError, match=told):
        encode({"a": (0, obj)})


def test_places_of_keys_and_elements() -> None:
    with pytest.raises(ValueError, match=r"the key <Colour\.RED: 1> of state is"):
        encode({Colour.RED: 1})
    with pytest.raises(ValueError, match=r"an element of state\[0\] is"):
        encode([{Colour.RED}])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="does it contain itself"):
        encode(loop)


def test_every_flipped_bit_is_noticed() -> None:
    record = encode({"epoch": 3, "lr": [0.1, None], "rng": torch.arange(5)})
    for position in range(len(record) * 8):
        damaged = bytearray(record)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match="record"):
            decode(damaged)


def test_every_cut_is_noticed() -> None:
    record = encode({"epoch": 3, "lr": [0.1, None]})
    for length in range(len(record)):
        with pytest.raises(ValueError, match="record"):
            decode(record[:length])
    with pytest.raises(ValueError, match="cut off"):
        decode(record + b"x")


def test_another_version_says_so() -> None:
    record = codec._HEADER.pack(codec.MAGIC, 9, 1) + b"N"
    with pytest.raises(ValueError, match="version 9"):
        decode(record + struct.pack("<I", zlib.crc32(record)))


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_nonsense_with_a_right_checksum_is_a_value_error(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(sealed(body))


def test_deep_nonsense_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="malformed"):
        decode(sealed((b"l" + struct.pack("<I", 1)) * 100_000))
