"""Groups of machines under a storage cap: equal to trying all, never worse than the paper's greedy way."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from regrow.plan.grouping import Chain, best, frontier, greedy


def chain_of(dice, machines, *, alike=False):
    size = dice.uniform(1e6, 1e8)
    return Chain(
        replay_s=tuple(dice.uniform(0.1, 5.0) for _ in range(machines)),
        boundary_bytes=tuple(size if alike else dice.uniform(1e5, 1e8) for _ in range(machines - 1)),
        bandwidth=dice.uniform(1e7, 1e10),
        interval=dice.randrange(1, 100),
    )


def every(chain):
    inner = range(1, chain.machines)
    for count in range(chain.machines):
        for cuts in itertools.combinations(inner, count):
            yield chain.grouping([0, *cuts])


@pytest.mark.parametrize("machines", range(1, 13))
def test_equal_to_brute_force(machines):
    for seed in range(6 if machines > 9 else 20):
        dice = random.Random(f"{machines}/{seed}")
        chain = chain_of(dice, machines, alike=seed % 3 == 0)
        all_ = list(every(chain))
        whole = chain.grouping(range(machines)).storage_bytes
        for cap in (0.0, whole, *(dice.uniform(0, whole) for _ in range(4))):
            expected = min(grouping.expected_s for grouping in all_ if grouping.storage_bytes <= cap)
            found = best(chain, cap)
            assert found.storage_bytes <= cap
            assert found.expected_s == pytest.approx(expected, rel=1e-12)
            assert found.expected_s <= greedy(chain, cap).expected_s * (1 + 1e-12)
            assert greedy(chain, cap).storage_bytes <= cap


def test_the_frontier_is_all_that_nothing_beats():
    for seed in range(10):
        chain = chain_of(random.Random(seed), 9)
        points = [(grouping.storage_bytes, grouping.expected_s) for grouping in frontier(chain)]
        assert points == sorted(points) and len({cost for _, cost in points}) == len(points)
        for grouping in every(chain):
            assert any(
                storage <= grouping.storage_bytes and cost <= grouping.expected_s * (1 + 1e-12)
                for storage, cost in points
            )


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_a_thousand_machines(share):
    chain = chain_of(random.Random(1), 1000)
    cap = share * chain.grouping(range(1000)).storage_bytes
    began = time.process_time()
    found = best(chain, cap)
    assert time.process_time() - began < 5  # under a second on a machine that does nothing else
    assert found.storage_bytes <= cap
    assert found.expected_s <= greedy(chain, cap).expected_s * (1 + 1e-12)
    assert len(frontier(chain_of(random.Random(2), 60))) > 10


def test_prints_as_groups():
    chain = Chain(replay_s=(1.0, 1.0, 1.0, 1.0), boundary_bytes=(5.0, 1.0, 5.0), bandwidth=1e9, interval=1)
    assert str(best(chain, 1.0)) == "0-1 | 2-3"
    assert best(chain, 1.0).expected_s == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"replay_s": ()}, "at least one machine"),
        ({"boundary_bytes": ()}, "1 boundaries"),
        ({"boundary_bytes": (-1.0,)}, "from 0 on"),
        ({"bandwidth": 0.0}, "positive"),
        ({"interval": 0}, "at least 1"),
    ],
)
def test_what_cannot_be(change, why):
    fields = {"replay_s": (1.0, 1.0), "boundary_bytes": (1.0,), "bandwidth": 1.0, "interval": 1}
    with pytest.raises(ValueError, match=why):
        Chain(**{**fields, **change})
