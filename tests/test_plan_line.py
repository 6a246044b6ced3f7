"""Which snapshots are of the present's own past: compared with a history that remembers who computed what."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan import Holding, Restore, make_plan
from regrow.plan.line import BEFORE_ALL, LONGEST, Line, extended, lies_on, merged


def line_of(*pairs: tuple[int, int]) -> Line:
    return tuple((generation, Step(step)) for generation, step in pairs)


def test_what_was_done_again_is_no_past():
    line = line_of((3, 5))
    assert lies_on(line, Step(5), 2) and not lies_on(line, Step(6), 2)
    assert lies_on(line, Step(6), 3) and lies_on(line, Step(9), 4)
    assert not lies_on(extended((), 2, BEFORE_ALL), Step(0), 1)


def test_every_short_history():
    """Up to four generations, each going on anywhere in the past and doing up to three steps."""
    cases = 0
    for first in range(4):
        for more in itertools.product(itertools.product(range(6), range(4)), repeat=3):
            past = [0] * first  # which generation has computed each step of the present's past
            taken = {(step, 0): (0,) * step for step in range(first + 1)}
            line: Line = ()
            for generation, (back, done) in enumerate(more, start=1):
                at = max(0, len(past) - back)
                line = extended(line, generation, Step(at))
                past = past[:at] + [generation] * done
                taken |= {(step, generation): tuple(past[:step]) for step in range(at, len(past) + 1)}
            for (step, generation), state in taken.items():
                assert lies_on(line, Step(step), generation) == (state == tuple(past[:step])), (more, step, generation)
                cases += 1
    assert cases > 100_000


pairs = st.tuples(st.integers(0, 300), st.integers(-1, 300))


@given(st.lists(pairs, max_size=150), st.lists(pairs, max_size=30), pairs)
def test_a_short_line_says_what_the_long_one_said(some, others, snapshot):
    generation, step = snapshot
    told = [*some, *others]
    short = merged([line_of(*some), line_of(*others)])
    assert len(short) <= LONGEST and [*short] == sorted(short)
    assert all(one[1] < next_one[1] for one, next_one in itertools.pairwise(short))
    right = all(resumed >= step for later, resumed in told if later > generation)
    # never is one used that should not be, and none is passed over for nothing while all entries fit
    assert not lies_on(short, Step(step), generation) or right
    if len(told) <= LONGEST:
        assert lies_on(short, Step(step), generation) == right
    assert merged([short, line_of(*some)]) == short


State = tuple[int, ...]
"""Which generation has computed each step so far."""


@dataclass
class Place:
    """A host's memory: up to two snapshots of each rank, each with its generation and line, and its true state."""

    shelves: dict[int, dict[int, tuple[int, Line, State]]] = field(default_factory=dict)

    def keep(self, rank: int, step: int, generation: int, line: Line, state: State) -> None:
        shelf = self.shelves.setdefault(rank, {})
        if step not in shelf and len(shelf) == 2:
            del shelf[min(shelf)]
        shelf[step] = generation, line, state

    def drop(self, rank: int, line: Line) -> None:
        shelf = self.shelves.get(rank, {})
        for step in [step for step, (taken, *_) in shelf.items() if not lies_on(line, Step(step), taken)]:
            del shelf[step]


class History:
    """Three ranks, each keeping the next one's snapshots; their hosts are cut off, and come back as they were."""

    RANKS = 3

    def __init__(self) -> None:
        self.places = [Place() for _ in range(6)]
        self.home = [*range(self.RANKS)]
        self.states: list[State | None] = [()] * self.RANKS
        self.labels = [0] * self.RANKS
        self.lines: list[Line] = [extended((), 0, BEFORE_ALL)] * self.RANKS
        self.generation = 0
        self.snapshots()

    def keeper(self, rank: int) -> Place:
        return self.places[self.home[(rank + 1) % self.RANKS]]

    def snapshots(self, *, only: int | None = None) -> None:
        for rank, state in enumerate(self.states):
            if state is not None and only in (None, rank):
                facts = (len(state), self.generation, self.lines[rank], state)
                self.places[self.home[rank]].keep(rank, *facts)
                self.keeper(rank).keep(rank, *facts)

    def step(self, ahead: int | None) -> None:
        """All do a step, or one is ahead of those who were interrupted after its last collective."""
        for rank, state in enumerate(self.states):
            assert state is not None
            if ahead in (None, rank):
                self.states[rank] = (*state, self.generation)
        self.snapshots(only=ahead)

    def lose(self, rank: int, *, cut: bool) -> None:
        """A worker dies, or its host is cut off: the rank goes to another one, or back to where it was before."""
        self.states[rank] = None
        if cut:
            self.home[rank] = (self.home[rank] + self.RANKS) % (2 * self.RANKS)

    def heal(self, torn: int | None) -> bool:
        """Plan and go on; ``torn``: so many ranks had done all that the plan says when another failure came."""
        holdings = []
        for rank, state in enumerate(self.states):
            place = self.places[self.home[rank]]
            own = place.shelves.get(rank, {})
            kept = [(other, step, facts) for other in place.shelves for step, facts in place.shelves[other].items()]
            lines = [self.lines[rank] if state is not None else (), *(facts[1] for *_, facts in kept)]
            holdings.append(
                Holding(
                    rank=Rank(rank), step=None if state is None else Step(len(state)),
                    params=1, layout="", place=f"{rank}",
                    snapshots=tuple((Step(step), facts[0]) for step, facts in own.items()), node=self.home[rank],
                    kept=tuple((Rank(other), Step(step), facts[0]) for other, step, facts in kept if other != rank),
                    generation=self.labels[rank], line=merged(lines),
                )
            )  # fmt: skip
        self.generation += 1
        try:
            plan = make_plan(holdings)
        except Unrecoverable:
            return False
        line = extended(merged(holding.line for holding in holdings), self.generation, plan.step)
        after = list(self.states)
        for action in plan.actions:
            if isinstance(action, Restore):
                place = self.places[self.home[action.rank] if action.node is None else action.node]
                after[action.rank] = place.shelves[action.rank][plan.step][2]
        assert None not in after
        assert len({*after}) == 1, f"ranks go on from different pasts: {after}, {plan}"
        if torn is None:
            survivors = [state for state in self.states if state is not None]
            assert not survivors or len(after[0] or ()) <= max(map(len, survivors))
        for rank in range(self.RANKS if torn is None else torn):
            self.states[rank], self.labels[rank], self.lines[rank] = after[rank], self.generation, line
            self.places[self.home[rank]].drop(rank, line)
            self.keeper(rank).drop(rank, line)
        if torn is None:
            self.snapshots()
        return True


moves = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 2)),
    st.tuples(st.just("cut"), st.none() | st.integers(0, 2), st.sets(st.integers(0, 2), max_size=2)),
    st.tuples(st.just("die"), st.none() | st.integers(0, 2), st.sets(st.integers(0, 2))),
    st.tuples(st.just("torn"), st.none(), st.integers(0, 2)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(moves, max_size=25))
def test_all_go_on_from_one_past_whatever_was_cut_off_and_came_back(events):
    history = History()
    for event in events:
        match event:
            case ("steps", count):
                for _ in range(count):
                    history.step(None)
                continue
            case ("cut" | "die" as how, ahead, ranks):
                if ahead is not None:
                    history.step(ahead)
                for rank in ranks:
                    history.lose(rank, cut=how == "cut")
            case ("torn", _, ranks):
                if not history.heal(ranks):
                    return
        if not history.heal(None):
            return


def test_a_host_that_comes_back_with_another_future():
    """Rank 1's host was cut off at step 8; the others went back to 6 without it, and stand at 7 when rank 1 returns."""
    line = line_of((0, -1), (1, 6))
    new = {"params": 1, "layout": "", "generation": 1, "line": line}
    holdings = [
        Holding(rank=Rank(0), step=Step(8), place="a", snapshots=((Step(7), 1), (Step(8), 1)), **new),
        Holding(
            rank=Rank(1), step=None, params=1, layout="", place="b", node=1,
            snapshots=((Step(7), 0), (Step(8), 0)), line=line_of((0, -1)),
        ),
        Holding(rank=Rank(2), step=Step(8), place="c", node=2, kept=((Rank(1), Step(7), 1),),
                snapshots=((Step(7), 1), (Step(8), 1)), **new),
    ]  # fmt: skip
    plan = make_plan(holdings)
    assert plan.step == 7
    assert Restore(rank=Rank(1), step=Step(7), node=2) in plan.actions
    assert "done again since are passed over" in plan.reason
    holdings[2] = Holding(rank=Rank(2), step=Step(8), place="c", snapshots=((Step(7), 1), (Step(8), 1)), **new)
    with pytest.raises(Unrecoverable, match="the state of rank 1 is lost"):
        make_plan(holdings)
