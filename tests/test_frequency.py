"""How often a checkpoint is written: the formulas, and the governor in a run whose time is simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.plan.frequency import Governor, Profile, Proposal, every, stall_s, young_daly, young_daly_steps
from regrow.plan.overhead import Overhead

BUDGET = 0.035


def profile(iteration_s: float = 0.1, update_s: float = 0.02, copy_s: float = 0.03, write_s: float = 0.4) -> Profile:
    return Profile(iteration_s=iteration_s, update_s=update_s, copy_s=copy_s, write_s=write_s)


# the formulas -------------------------------------------------------------------------------------------------------


def test_a_copy_that_fits_beside_forward_and_backward_stalls_nothing() -> None:
    assert stall_s(profile(copy_s=0.08)) == 0
    assert stall_s(profile(copy_s=0.1)) == pytest.approx(0.02)
    assert stall_s(profile(copy_s=0.1, update_s=0.2)) == pytest.approx(
        0.1
    )  # measured apart, the update may seem longer


@pytest.mark.parametrize(
    ("measured", "steps"),
    [
        (profile(copy_s=0.0, write_s=0.0), 1),
        (profile(copy_s=0.05, write_s=0.05), 1),
        (profile(copy_s=0.0, write_s=0.3), 3),  # 0.3 / 0.1 is a little less than 3 in floats
        (profile(copy_s=0.1, write_s=0.2, update_s=0.0), 3),  # and (0.1 + 0.2) / 0.1 a little more
        (profile(copy_s=0.03, write_s=0.41), 5),
        (profile(copy_s=0.15, write_s=0.41), 20),  # 0.07 s of stall are 3.5% of 20 steps
        (profile(copy_s=0.15, write_s=9.0), 91),
    ],
)
def test_the_formula(measured: Profile, steps: int) -> None:
    assert every(measured, BUDGET) == steps


durations = st.floats(0, 100)


@given(iteration_s=st.floats(0.001, 10), update_s=durations, copy_s=durations, write_s=durations, p=st.floats(0.001, 1))
def test_one_checkpoint_at_a_time_and_stalls_within_the_budget(
    iteration_s: float, update_s: float, copy_s: float, write_s: float, p: float
) -> None:
    measured = Profile(iteration_s=iteration_s, update_s=update_s, copy_s=copy_s, write_s=write_s)
    steps, stall = every(measured, p), stall_s(measured)
    nearly = 1 + 1e-6
    assert 0 <= stall <= copy_s
    assert stall <= p * steps * iteration_s * nearly
    assert copy_s + write_s <= (steps * iteration_s + stall) * nearly
    assert every(measured, p * 2) <= steps


def test_young_and_daly() -> None:
    assert young_daly(0.5, 3600) == 60
    assert young_daly_steps(0.5, 3600, 0.12) == 500
    assert young_daly_steps(0.0, 3600, 0.12) == 1

    def lost(seconds: float) -> float:
        return 0.5 / seconds + seconds / 2 / 3600

    assert lost(60) < min(lost(50), lost(70))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: profile(iteration_s=0), "iteration_s=0"),
        (lambda: profile(copy_s=-1), "copy_s=-1"),
        (lambda: profile(write_s=math.nan), "write_s=nan"),
        (lambda: every(profile(), 0), "overhead=0"),
        (lambda: young_daly(1, 0), "mtbf_s=0"),
        (lambda: Governor(overhead=0), "overhead=0"),
        (lambda: Governor(start=0), "start=0"),
        (lambda: Governor(fixed=0), "fixed=0"),
        (lambda: Governor(mtbf_s=-1), "mtbf_s=-1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


# a simulated run ----------------------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """A training: noisy steps, slower by ``slow`` while a checkpoint is copied and written; copies may stall one."""

    governor: Governor
    step_s: float = 0.1
    noise: float = 0.05
    copy_s: float = 0.03
    write_s: float = 0.4
    slow: float = 0.0
    odd: Callable[[int], float] = lambda step: 0.0
    """What a step takes beyond the ordinary, and nobody says why."""
    seed: int = 0
    now_s: float = 0.0
    steps: int = 0
    proposals: list[Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._written_s = 0.0
        self._stall_s = 0.0
        self._left = self.governor.every

    @property
    def changes(self) -> list[int]:
        return [each.every for each in self.proposals if each.reason]

    def run(self, steps: int) -> float:
        """Train on; return the true overhead."""
        extra = plain = 0.0
        for _ in range(steps):
            alone_s = self.step_s * self._random.lognormvariate(0, self.noise)
            busy = self.now_s < self._written_s
            cost_s, self._stall_s = busy * alone_s * self.slow + self._stall_s, 0.0
            extra, plain = extra + cost_s, plain + alone_s
            duration_s = alone_s + cost_s + self.odd(self.steps)
            self.governor.step(duration_s, busy=busy)
            self.now_s += duration_s
            self.steps += 1
            self._left -= 1
            if self._left <= 0 and self.now_s >= self._written_s:
                self._begin()
        return extra / plain

    def _begin(self) -> None:
        if self._written_s:
            wobble = self._random.lognormvariate
            copy_s, write_s = self.copy_s * wobble(0, 0.03), self.write_s * wobble(0, 0.05)
            self.governor.saved(copy_s=copy_s, write_s=write_s, update_s=0.02)
        self.proposals.append(self.governor.turn())
        self._left = self.proposals[-1].every
        self._written_s = self.now_s + self.copy_s + self.write_s
        self._stall_s = max(0.0, self.copy_s - (self.step_s - 0.02))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("slow", [0.03, 0.1, 0.5])
def test_it_converges_within_the_budget_and_stays(slow: float, noise: float, seed: int) -> None:
    job = Simulated(Governor(overhead=BUDGET), slow=slow, noise=noise, seed=seed)
    job.run(3000)
    settled = len(job.changes)
    assert settled <= 5
    assert job.run(6000) <= BUDGET
    assert len(job.changes) - settled <= (4 if noise > 0.05 else 1)
    busy = math.ceil(0.43 / (0.1 * (1 + slow)))
    needed = max(every(profile(), BUDGET), busy * slow / BUDGET)
    assert needed * 0.95 <= job.governor.every <= needed * 2  # no rarer than it must be, either


@pytest.mark.parametrize("start", [1, 4, 1000])
def test_it_does_not_matter_where_it_begins(start: int) -> None:
    job = Simulated(Governor(overhead=BUDGET, start=start), slow=0.5)
    job.run(8000)
    assert 0.5 * BUDGET < job.run(2000) <= BUDGET * 1.02


def test_without_overhead_it_goes_down_to_the_formula_by_half_at_most() -> None:
    job = Simulated(Governor(start=100))
    job.run(5000)
    assert job.changes == [50, 25, 13, 7, 5]
    assert every(profile(), BUDGET) == 5


def test_checkpoints_that_cost_nothing_are_taken_at_every_step() -> None:
    job = Simulated(Governor(), copy_s=0.01, write_s=0.02)
    job.run(3000)
    assert job.governor.every == 1


def test_stalls_follow_the_formula_before_anything_was_measured() -> None:
    job = Simulated(Governor(overhead=BUDGET), copy_s=1.0)
    job.run(45)
    assert job.changes == [job.governor.every]
    assert job.governor.every >= 250  # 0.92 s are 3.5% of 263 steps
    job.run(3000)
    assert job.run(6000) <= BUDGET * 1.05
    assert len(job.changes) <= 3


def test_a_slower_disk_is_followed_in_proportion_and_back() -> None:
    job = Simulated(Governor(overhead=BUDGET), slow=0.3)
    job.run(3000)
    first = job.governor.every
    job.write_s = 2.0
    job.run(2000)
    assert job.run(3000) <= BUDGET * 1.02
    assert 3 * first < job.governor.every < 6 * first
    job.write_s = 0.4
    job.run(6000)
    assert job.governor.every < 1.6 * first
    assert len(job.changes) <= 10


@pytest.mark.parametrize("step_s", [0.09, 0.11])
def test_steps_that_change_are_not_taken_for_overhead(step_s: float) -> None:
    job = Simulated(Governor(overhead=BUDGET), slow=0.03)
    job.run(3000)
    before = job.governor.every
    job.step_s = step_s
    for _ in range(10):
        job.run(500)
        assert before - 1 <= job.governor.every <= 3 * before
    assert job.governor.every <= before + 2


# odd steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [25, 61, 1500, 1501, 1502, 1503, 1504, 1510])
@pytest.mark.parametrize("odd_s", [2.0, 600.0])
def test_one_odd_step_changes_nothing(at: int, odd_s: float) -> None:
    """A recovery, an evaluation: quiet or beside a checkpoint, at the beginning or later."""
    plain = Simulated(Governor(), slow=0.1, noise=0.0)
    plain.run(3000)
    job = Simulated(Governor(), slow=0.1, noise=0.0, odd=lambda step: odd_s if step == at else 0.0)
    job.run(3000)
    assert job.governor.every == plain.governor.every
    assert len(job.changes) <= len(plain.changes) + 1


def test_evaluations_now_and_then_do_not_drive_it_away() -> None:
    job = Simulated(Governor(overhead=BUDGET), slow=0.1, odd=lambda step: 2.0 if step % 101 == 100 else 0.0)
    job.run(3000)
    assert job.run(9000) <= BUDGET * 1.02
    assert job.governor.every <= 60


def test_excluded_steps_and_the_warm_up_count_for_nothing() -> None:
    meter = Overhead()
    for _ in range(5):
        meter.step(60.0, busy=False)
    for step in range(40):
        meter.step(0.1, busy=False)
        meter.step(50.0, busy=bool(step % 2), excluded=True)
    meter.turn()
    assert meter.baseline_s == pytest.approx(0.1)
    for _ in range(2):
        meter.step(0.3, busy=True)
        meter.step(99.0, busy=True, excluded=True)
        meter.turn()
    assert meter.cost_s == pytest.approx(0.2)


def test_steps_that_are_long_by_nature_are_no_overhead() -> None:
    def run(meter: Overhead, steps: int, *, busy: bool) -> None:
        for step in range(steps):
            meter.step(0.13 if step % 3 == 0 else 0.1, busy=busy)  # the mean is a tenth above the median

    meter = Overhead()
    run(meter, 305, busy=False)
    for _ in range(20):
        meter.turn()
        run(meter, 30, busy=True)
    assert meter.cost_s == pytest.approx(0.0, abs=0.02)  # of 30 steps, or 3.3 s


# the baseline when a checkpoint is always under way -----------------------------------------------------------------


def always_busy(duration_s: float, intervals: int) -> Overhead:
    meter = Overhead()
    for _ in range(45):
        meter.step(0.1, busy=False)
    for _ in range(intervals):
        meter.turn()
        for _ in range(4):
            meter.step(duration_s, busy=True)
    return meter


def test_the_baseline_does_not_come_to_include_the_overhead() -> None:
    meter = always_busy(0.11, 2000)
    assert meter.baseline_s == pytest.approx(0.1)
    assert meter.cost_s == pytest.approx(0.04)


def test_a_baseline_above_even_disturbed_steps_follows_them() -> None:
    assert always_busy(0.08, 10).baseline_s == pytest.approx(0.1)
    assert always_busy(0.08, 2000).baseline_s == pytest.approx(0.08)


def test_without_any_quiet_step_the_interval_grows_until_there_are_some() -> None:
    job = Simulated(Governor(start=1), write_s=3.0)
    job.run(300)
    assert job.changes[:6] == [2, 4, 8, 16, 32, 64]  # a checkpoint takes 31 steps
    job.run(1000)
    assert job.governor.measured is not None
    assert 31 <= job.governor.every <= 64


# Young and Daly, a fixed number, words --------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("slow", [0.0, 0.2])
def test_never_more_often_than_is_worth_it(slow: float, noise: float) -> None:
    job = Simulated(Governor(mtbf_s=4 * 3600), slow=slow, noise=noise)
    job.run(9000)
    worth = young_daly_steps(max(0.1 * 4.5 * slow, 0.001), 4 * 3600, 0.1)
    assert worth / 3 < job.governor.every < worth * 3
    assert len(job.changes) <= 4


def test_never_more_often_than_the_budget_allows() -> None:
    with_mtbf, without = (Simulated(Governor(mtbf_s=mtbf_s), slow=0.5) for mtbf_s in (30.0, None))
    with_mtbf.run(3000), without.run(3000)
    assert with_mtbf.governor.every == without.governor.every


def test_a_fixed_number_stays_and_is_measured() -> None:
    job = Simulated(Governor(fixed=7, mtbf_s=3600), slow=0.5, noise=0.0)
    job.run(500)
    assert {each.every for each in job.proposals} == {7}
    assert not job.changes
    assert job.governor.explain().startswith("every 7 steps (fixed): copy 0.030 s")
    assert job.governor.measured == pytest.approx(3 * 0.05 / 0.7)


def test_it_explains_itself() -> None:
    governor = Governor(overhead=BUDGET, start=12, mtbf_s=20)
    assert governor.explain() == "every 12 steps: nothing measured yet"
    for _ in range(25):
        governor.step(0.12, busy=False)
    governor.saved(copy_s=0.031, write_s=0.41, update_s=0.01)
    governor.turn()
    known = "every 12 steps: copy 0.031 s (stalls 0.000 s), write 0.410 s, step 0.120 s, overhead "
    assert governor.explain() == known + "not measured yet"
    for _ in range(2):
        for step in range(12):
            governor.step(0.13 if step < 4 else 0.12, busy=step < 4)
        assert governor.turn() == Proposal(12)
    assert governor.explain() == known + "2.8% of 3.5%; Young/Daly for an MTBF of 20 s: every 11 steps"


def test_a_change_says_why() -> None:
    job = Simulated(Governor(overhead=BUDGET), slow=0.5, noise=0.0)
    job.run(200)
    (change,) = [each for each in job.proposals if each.reason]
    assert change.reason == "an overhead of 7.50% is over the budget of 3.50%"


@given(
    slow=st.floats(0, 3),
    noise=st.floats(0, 0.5),
    write_s=st.floats(0, 5),
    copy_s=st.floats(0, 1),
    start=st.integers(1, 60),
)
@settings(max_examples=40, deadline=None)
def test_never_below_the_formula(slow: float, noise: float, write_s: float, copy_s: float, start: int) -> None:
    job = Simulated(Governor(start=start), slow=slow, noise=noise, write_s=write_s, copy_s=copy_s)
    for _ in range(12):
        job.run(50)
        job.governor.turn()
        measured = job.governor.profile
        if measured is not None:
            assert job.governor.every >= every(measured, BUDGET)
