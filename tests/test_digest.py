"""The digest: equal for equal bits anywhere, different for any difference."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regrow.digest import state_digest

_PROGRAM = """
import torch
from torch import nn
from regrow.digest import state_digest
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(5, 4)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    names: dict[str, Any] = {}
    exec(_PROGRAM, names)
    return names["net"], names["optimizer"]


def test_the_same_in_another_process() -> None:
    command = _PROGRAM + "print(state_digest(net, optimizer, {'a': {1, 2}, 'b': 'x'}))"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "77"}
    told = subprocess.run(
        [sys.executable, "-c", command], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == state_digest(*trained(), {"b": "x", "a": {2, 1}})
    assert len(told.stdout.strip()) == 64


def test_every_bit_of_a_module_counts() -> None:
    net, _ = trained()
    before = state_digest(net)
    assert state_digest(copy.deepcopy(net)) == before
    seen = {before}
    for name, tensor in list(net.named_parameters()) + list(net.named_buffers()):
        changed = copy.deepcopy(net)
        flat = dict(list(changed.named_parameters()) + list(changed.named_buffers()))[name].detach().reshape(-1)
        flat.view(torch.uint8)[-tensor.element_size()] ^= 1
        seen.add(state_digest(changed))
    assert len(seen) == 1 + 7


def test_names_buffers_and_extra_state_count() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2), persistent=False)
            self.extra = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None: ...

    kept, other = Kept(), Kept()
    assert state_digest(kept) == state_digest(other)
    other.extra = 1
    assert state_digest(kept) != state_digest(other)
    other.extra = 0
    other.seen += 1
    assert state_digest(kept) != state_digest(other)
    weight = torch.ones(1)
    assert state_digest({"a": weight}) != state_digest({"b": weight})


def test_optimizer_state_options_and_step_count() -> None:
    _, optimizer = trained()
    before = state_digest(optimizer)
    assert state_digest(trained()[1]) == before
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["step"] += 1
    assert state_digest(optimizer) != before
    optimizer.state[first]["step"] -= 1
    assert state_digest(optimizer) == before
    optimizer.param_groups[0]["lr"] = 0.2
    assert state_digest(optimizer) != before


def test_layout_of_memory_does_not_count() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    strange = torch.empty(4, 3).t().copy_(matrix)
    assert not strange.is_contiguous()
    assert state_digest(strange) == state_digest(matrix)
    assert state_digest(torch.stack([matrix, matrix])[1]) == state_digest(matrix)
    assert state_digest(torch.ones(1).expand(5)) == state_digest(torch.ones(5))
    assert state_digest(matrix.reshape(4, 3)) != state_digest(matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_any_dtype(dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, dtype=dtype)
    assert state_digest(zeros) == state_digest(zeros.clone())
    assert state_digest(zeros) != state_digest(zeros.view(torch.uint8))
    assert state_digest(zeros) != state_digest(torch.ones(3).to(dtype))
    assert state_digest(torch.tensor(0).to(dtype)) != state_digest(zeros[:0])


def test_values_and_types_count_order_of_keys_does_not() -> None:
    values = [
        None, True, 1, 1.0, -1, 0.0, -0.0, "1", b"1", 1j, [1], [[1]], [1, 1], {1}, {1: 1}, {"1": 1}, torch.tensor(1),
        np.float32(1), np.float64(1), np.ones(1), torch.float32, torch.device("cpu"), float("nan"),
    ]  # fmt: skip
    assert len({state_digest({"x": value}) for value in values}) == len(values)
    assert state_digest({"a": 1, "b": 2}) == state_digest(OrderedDict(b=2, a=1))
    assert state_digest({"x": (1, 2)}) == state_digest({"x": [1, 2]})
    assert state_digest({"x": float("nan")}) == state_digest({"x": float("nan")})
    assert state_digest({"a": 1}, {"b": 2}) != state_digest({"b": 2}, {"a": 1})
    assert state_digest({"x": ["ab", "c"]}) != state_digest({"x": ["a", "bc"]})


def test_ddp_is_looked_through() -> None:
    import torch.distributed as dist

    net, _ = trained()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net)
        assert state_digest(wrapped) == state_digest(net)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("obj", "told"),
    [
        ({"a": [1, print]}, r"object 0\['a'\]\[1\] is a builtins"),
        ({"a": torch.eye(2).to_sparse()}, r"object 0\['a'\] is a sparse"),
        ({"a": torch.empty(2, device="meta")}, "meta"),
        ({"a": np.array([object()])}, "array of objects"),
    ],
)
def test_what_has_no_bytes_is_refused(obj: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        state_digest(obj)
