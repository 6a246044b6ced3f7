"""Choose which machines of a pipeline fail and are replayed together, so that the journals fit a storage cap. Pure.

Only what crosses from one group to another is journaled; when a machine is lost its whole group goes back to the
checkpoint and is replayed. Larger groups need less storage and take longer. For a chain of machines with replay times
``R`` and ``A`` bytes per step across each boundary, a group takes the sum of its ``R``, and for each boundary within
it the time that ``A`` takes on the wire; every machine is as likely to fail as any other.

The best grouping under a cap is a shortest path with a limited resource. It is solved exactly: a multiplier on the
storage gives bounds from both sides, the bounds rule out nearly all groups, and among those that are left all
combinations that no other one beats in both time and storage are followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
_SLACK = 1e-9
_SHARES = (0.0, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Grouping:
    """Groups of neighbours: ``starts`` says which machine begins each. Prints as ``0-2 | 3 | 4-5``."""

    starts: tuple[int, ...]
    machines: int
    storage_bytes: float
    expected_s: float

    @property
    def groups(self) -> list[range]:
        """The machines of each group."""
        return [range(a, b) for a, b in zip(self.starts, (*self.starts[1:], self.machines), strict=True)]

    def __str__(self) -> str:
        return " | ".join(str(g.start) if len(g) == 1 else f"{g.start}-{g.stop - 1}" for g in self.groups)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A pipeline of machines, as it was measured."""

    replay_s: tuple[float, ...]
    """Seconds to replay each machine's part after a failure."""
    boundary_bytes: tuple[float, ...]
    """Bytes that cross each boundary in a step, in both directions."""
    bandwidth: float
    """Bytes a second between machines."""
    interval: int
    """Steps from one checkpoint to the next: as many are kept in the journals."""

    def __post_init__(self) -> None:
        if not self.replay_s:
            raise ValueError("a pipeline has at least one machine: replay_s is empty")
        if len(self.boundary_bytes) != len(self.replay_s) - 1:
            raise ValueError(
                f"{len(self.replay_s)} machines have {len(self.replay_s) - 1} boundaries, "
                f"but boundary_bytes has {len(self.boundary_bytes)}"
            )
        numbers = (*self.replay_s, *self.boundary_bytes)
        if not all(math.isfinite(value) and value >= 0 for value in numbers):
            raise ValueError("replay_s and boundary_bytes must be numbers from 0 on")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"bandwidth must be a positive number of bytes a second, got {self.bandwidth}")
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1 step, got {self.interval}")

    @property
    def machines(self) -> int:
        """How many there are."""
        return len(self.replay_s)

    @cached_property
    def cut_bytes(self) -> Floats:
        """What it takes to journal across the boundary before each machine; nothing before the first, or at the end."""
        inner = np.asarray(self.boundary_bytes, dtype=float) * self.interval
        return np.concatenate([[0.0], inner, [0.0]])

    @cached_property
    def costs(self) -> Floats:
        """``costs[i, j]``: the part of the expected time that is due to a group of machines i to j - 1."""
        count = self.machines
        replay = np.concatenate([[0.0], np.cumsum(self.replay_s)])
        wires = np.concatenate([[0.0], np.cumsum(np.asarray(self.boundary_bytes, dtype=float) / self.bandwidth)])
        i, j = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
        inside = wires[np.clip(j - 1, 0, count - 1)] - wires[np.clip(i, 0, count - 1)]
        costs = (j - i) * (replay[j] - replay[i] + inside) / count
        return np.where(j > i, costs, np.inf)

    def grouping(self, starts: Sequence[int]) -> Grouping:
        """Return the grouping with these first machines, and what it costs."""
        ends = [*starts[1:], self.machines]
        expected = float(sum(self.costs[a, b] for a, b in zip(starts, ends, strict=True)))
        return Grouping(tuple(starts), self.machines, float(sum(self.cut_bytes[a] for a in starts)), expected)


def best(chain: Chain, cap_bytes: float) -> Grouping:
    """Return the grouping with the least expected recovery time whose journals fit the cap."""
    if cap_bytes < 0:
        raise ValueError(f"the storage cap must not be negative, got {cap_bytes}")
    alone = chain.grouping(range(chain.machines))
    if alone.storage_bytes <= cap_bytes:
        return alone
    cap_bytes = _reachable(chain, cap_bytes)
    together = chain.grouping([0])
    multiplier, found = _bounded(chain, cap_bytes, alone, together)
    return _closed(chain, cap_bytes, multiplier, found)


def _reachable(chain: Chain, cap_bytes: float) -> float:
    """Return the cap without what no grouping could use of it: boundaries are often alike."""
    cuts = chain.cut_bytes[chain.cut_bytes > 0]
    if np.all(cuts == cuts[0]):
        unit = float(cuts[0])
    elif np.all(cuts == np.floor(cuts)) and cuts.max() < 2**53:
        unit = float(np.gcd.reduce(cuts.astype(np.int64)))
    else:
        return cap_bytes
    return min(cap_bytes, math.floor(cap_bytes / unit * (1 + _SLACK)) * unit * (1 + _SLACK))  # sums round


def greedy(chain: Chain, cap_bytes: float) -> Grouping:
    """Return what the paper's way gives: merge, again and again, the neighbours that cost least time per byte saved."""
    starts = list(range(chain.machines))
    storage = chain.grouping(starts).storage_bytes
    while storage > cap_bytes and len(starts) > 1:
        ends = [*starts[1:], chain.machines]

        def price(at: int, ends: list[int] = ends) -> float:
            more = chain.costs[starts[at - 1], ends[at]]
            less = chain.costs[starts[at - 1], starts[at]] + chain.costs[starts[at], ends[at]]
            saved = chain.cut_bytes[starts[at]]
            return float((more - less) / saved) if saved else math.inf

        starts.pop(min(range(1, len(starts)), key=price))
        storage = chain.grouping(starts).storage_bytes
    return chain.grouping(starts)


def frontier(chain: Chain) -> list[Grouping]:
    """Return groupings from the least storage to the least time, none of which another one beats in both.

    All of them for up to 16 machines; for more, those at which a straight edge touches the frontier: none lies below.
    """
    if chain.machines <= 16:
        return _all_points(chain)
    ends = [chain.grouping([0]), chain.grouping(range(chain.machines))]
    found = {grouping.starts: grouping for grouping in ends}
    todo = [(ends[0], ends[1])]
    while todo and len(found) < 200:
        low, high = todo.pop()
        if high.storage_bytes <= low.storage_bytes:
            continue
        multiplier = (low.expected_s - high.expected_s) / (high.storage_bytes - low.storage_bytes)
        between = chain.grouping(_cheapest(chain, multiplier)[0])
        gain = low.expected_s + multiplier * low.storage_bytes - between.expected_s
        if gain - multiplier * between.storage_bytes > _SLACK * low.expected_s and between.starts not in found:
            found[between.starts] = between
            todo += [(low, between), (between, high)]
    return _unbeaten(found.values())


def _unbeaten(groupings: Any) -> list[Grouping]:
    kept: list[Grouping] = []
    for grouping in sorted(groupings, key=lambda grouping: (grouping.storage_bytes, grouping.expected_s)):
        if not kept or grouping.expected_s < kept[-1].expected_s:
            kept.append(grouping)
    return kept


def _all_points(chain: Chain) -> list[Grouping]:
    states: list[list[tuple[float, float, tuple[int, ...]]]] = [[(0.0, 0.0, ())]]
    for end in range(1, chain.machines + 1):
        here = sorted(
            (storage + chain.cut_bytes[start], cost + chain.costs[start, end], (*starts, start))
            for start in range(end)
            for storage, cost, starts in states[start]
        )
        kept: list[tuple[float, float, tuple[int, ...]]] = []
        for state in here:
            if not kept or state[1] < kept[-1][1]:
                kept.append(state)
        states.append(kept)
    return _unbeaten(chain.grouping(starts) for _, _, starts in states[-1])


# the exact search ----------------------------------------------------------------------------------------------------


def _cheapest(chain: Chain, multiplier: float) -> tuple[list[int], Floats]:
    """Return the first machines of the cheapest groups when storage has this price, and the cost up to each machine."""
    count = chain.machines
    price = chain.cut_bytes * multiplier
    upto = np.zeros(count + 1)
    before = np.zeros(count + 1, dtype=int)
    for end in range(1, count + 1):
        total = upto[:end] + price[:end] + chain.costs[:end, end]
        before[end] = int(np.argmin(total))
        upto[end] = total[before[end]]
    starts = []
    at = count
    while at:
        at = int(before[at])
        starts.append(at)
    return starts[::-1], upto


def _bounded(chain: Chain, cap: float, over: Grouping, under: Grouping) -> tuple[float, Grouping]:
    """Return the price at which groupings over and under the cap cost the same, and the best one found under it."""
    multiplier = 0.0
    while over.storage_bytes > under.storage_bytes:
        multiplier = (under.expected_s - over.expected_s) / (over.storage_bytes - under.storage_bytes)
        middle = chain.grouping(_cheapest(chain, multiplier)[0])
        edge = under.expected_s + multiplier * under.storage_bytes
        if middle.expected_s + multiplier * middle.storage_bytes >= edge * (1 - _SLACK):
            break
        if middle.storage_bytes > cap:
            over = middle
        else:
            under = middle
    return multiplier, under


def _closed(chain: Chain, cap: float, multiplier: float, known: Grouping) -> Grouping:
    """Close the gap between the bound and the best one known, over the groups that could be part of a better one.

    Whatever beats a grouping of expected time ``t`` costs less than ``t`` and the whole cap, storage priced. So all
    below a limit are looked at, first a low one: what is found is the best there is if its own limit is no higher.
    """
    count = chain.machines
    price = chain.cut_bytes * multiplier
    _, upto = _cheapest(chain, multiplier)
    onward = np.zeros(count + 1)  # from each machine to the end, its own boundary included
    for start in range(count - 1, -1, -1):
        onward[start] = price[start] + np.min(chain.costs[start, start + 1 :] + onward[start + 1 :])
    through = upto[:, None] + chain.costs + price[:, None] + onward[None, :]
    least, most = float(upto[count]), known.expected_s + multiplier * cap
    for share in _SHARES:
        limit = (least + share * (most - least)) * (1 + _SLACK)
        found = _below(chain, cap, multiplier, limit, through, onward)
        if found is not None and found.expected_s + multiplier * cap <= limit:
            return found
    return known


def _below(
    chain: Chain, cap: float, multiplier: float, limit: float, through: Floats, onward: Floats
) -> Grouping | None:
    """Return the best grouping within the cap among those whose cost, storage priced, is below a limit."""
    count = chain.machines
    storage: list[Floats] = [np.zeros(1)]
    cost: list[Floats] = [np.zeros(1)]
    origin: list[np.ndarray[Any, np.dtype[np.int64]]] = [np.zeros((1, 2), dtype=np.int64)]
    for end in range(1, count + 1):
        stores, costs, origins = [np.zeros(0)], [np.zeros(0)], [np.zeros((0, 2), dtype=np.int64)]
        for start in np.flatnonzero(through[:end, end] <= limit).tolist():
            used = storage[start] + chain.cut_bytes[start]
            spent = cost[start] + chain.costs[start, end]
            numbers = np.flatnonzero((used <= cap) & (spent + multiplier * used + onward[end] <= limit))
            stores.append(used[numbers])
            costs.append(spent[numbers])
            origins.append(np.stack([np.full_like(numbers, start), numbers], axis=1))
        used, spent, places = np.concatenate(stores), np.concatenate(costs), np.concatenate(origins)
        order = np.lexsort((spent, used))
        used, spent, places = used[order], spent[order], places[order]
        unbeaten = spent < np.minimum.accumulate(np.concatenate([[np.inf], spent]))[: len(spent)]
        storage.append(used[unbeaten])
        cost.append(spent[unbeaten])
        origin.append(places[unbeaten])
    if not len(cost[count]):
        return None
    starts = []
    at, number = count, int(np.argmin(cost[count]))
    while at:
        at, number = (int(value) for value in origin[at][number])
        starts.append(at)
    return chain.grouping(starts[::-1])
