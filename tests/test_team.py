"""Who computes which micro-batches of a shared replay, how many help, and which random numbers they begin with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regrow.plan.team import Balance, Room, TeamSize, fitting, slices
from regrow.run.draws import Draws, fingerprint


@given(st.integers(1, 50), st.integers(1, 12), st.floats(0, 100))
def test_each_micro_batch_once_in_order_and_the_least_for_the_owner(count, helpers, busy):
    parts = slices(count, helpers, busy, most=100)
    assert [number for part in parts for number in part] == list(range(count))
    assert len(parts) == helpers + 1
    assert len(parts[-1]) == min(map(len, parts))
    assert max(map(len, parts[:-1])) - min(map(len, parts[:-1])) <= 1


@pytest.mark.parametrize(
    "count, helpers, busy, sizes",
    [
        (8, 3, 0.0, [2, 2, 2, 2]),
        (8, 1, 0.0, [4, 4]),
        (8, 1, 2.0, [5, 3]),
        (8, 3, 9.0, [3, 3, 2, 0]),
        (2, 3, 0.0, [1, 1, 0, 0]),
    ],
)
def test_the_owner_takes_less_the_more_it_has_to_do_besides(count, helpers, busy, sizes):
    assert [len(part) for part in slices(count, helpers, busy, most=100)] == sizes


def test_only_the_first_takes_more_than_there_is_memory_for():
    assert [len(part) for part in slices(32, 3, 0.0, most=2)] == [26, 2, 2, 2]
    assert [len(part) for part in slices(32, 1, 0.0, most=1)] == [31, 1]


@given(
    count=st.integers(4, 32),
    helpers=st.integers(1, 6),
    busy=st.floats(0, 3),
    extra=st.floats(0, 3),
    first=st.floats(0, 3),
)
def test_what_helpers_do_besides_is_learnt_from_waiting_for_them(count, helpers, busy, extra, first):
    """After some steps no other share of the owner's would end all of it more than a micro-batch earlier."""

    def ends(own: int) -> tuple[float, float]:
        return own + busy, (count - own) / helpers + extra

    balance = Balance(first)
    for _ in range(12):
        own = len(slices(count, helpers, balance.lead, most=100)[-1])
        if own == 0:
            return  # nothing is learnt where the owner computes nothing
        mine, theirs = ends(own)
        balance.took(count, helpers, own=own, busy=busy, waited=max(theirs - mine, 0.0))
    best = min(max(ends(other)) for other in range(count // (helpers + 1) + 1))
    assert max(ends(own)) <= best + 1.001


def test_an_owner_that_waits_takes_more():
    balance = Balance(1.1)
    assert [len(part) for part in slices(8, 1, balance.lead, most=100)] == [5, 3]
    balance.took(8, 1, own=3, busy=1.1, waited=2.1)
    assert [len(part) for part in slices(8, 1, balance.lead, most=100)] == [4, 4]


def sizes(size: TeamSize, seconds: dict[int, float], steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        found.append(size.helpers)
        size.took(seconds[size.helpers])
    return found


def test_all_help_if_that_is_fastest():
    assert sizes(TeamSize(3, 1.0), {3: 0.3, 1: 0.6}, 5) == [3, 3, 1, 3, 3]


def test_half_as_many_as_long_as_that_is_faster():
    assert sizes(TeamSize(7, 1.0), {7: 0.9, 3: 0.6, 1: 0.5}, 5) == [7, 7, 3, 1, 1]


def test_nobody_helps_if_that_costs_more():
    assert sizes(TeamSize(3, 1.0), {3: 1.2, 0: 1.0}, 4) == [3, 3, 0, 0]


def test_those_with_cores_of_their_own_come_first_and_then_all():
    assert sizes(TeamSize(3, 1.0, fitting=1), {1: 0.5, 3: 0.3}, 4) == [1, 1, 3, 3]
    assert sizes(TeamSize(3, 1.0, fitting=1), {1: 0.5, 3: 0.48}, 4) == [1, 1, 3, 1]
    assert sizes(TeamSize(3, 1.0, fitting=1), {1: 1.5, 3: 1.6, 0: 1.0}, 4) == [1, 1, 3, 0]


def test_hosts_have_room_for_some():
    here, there = Room("here", 2), Room("there", 2)
    assert fitting(here, [(1, here), (2, here), (3, there), (4, there), (5, there)]) == [1, 3, 4]
    assert fitting(Room("here", 1), [(1, Room("here", 1))]) == []


def test_a_fixed_number_is_kept_to_and_none_are_not_tried():
    assert sizes(TeamSize(3, 1.0, fixed=2), {2: 9.0}, 3) == [2, 2, 2]
    assert TeamSize(3, 1.0, fixed=8).helpers == 3
    assert TeamSize(0, 1.0).helpers == 0


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.1)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
        nn.Linear(8, 8),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_was_drawn_can_be_drawn_again_without_computing(module):
    x = torch.randn(3, 5, 8)
    draws = Draws()
    with draws:
        module(x)
    for seed in range(3):
        torch.manual_seed(seed)
        module(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed)))
        expected = fingerprint(torch.get_rng_state())
        torch.manual_seed(seed)
        draws.again()
        assert fingerprint(torch.get_rng_state()) == expected
