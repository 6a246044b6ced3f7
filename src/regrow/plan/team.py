"""Who computes which micro-batches of a shared replay, and how many help. Pure: times in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def slices(count: int, helpers: int, lead: float, most: int) -> list[range]:
    """Divide micro-batches among helpers, in order, and what is left for the owner, as the last of all.

    ``lead``: for how many micro-batches' time the owner has more other things to do in a step, such as its update, than
    each helper. ``most``: of how many micro-batches a member has memory to keep the gradients apart; the first one need
    not.
    """
    owner = round((count / helpers - lead) / (1 + 1 / helpers))  # then all end at the same time
    owner = max(0, min(owner, count // (helpers + 1), most))
    each, more = divmod(count - owner, helpers)
    sizes = [each + (member < more) for member in range(helpers)]
    sizes[1:] = [min(size, most) for size in sizes[1:]]
    sizes[0] = count - owner - sum(sizes[1:])
    ends = list(accumulate([*sizes, owner]))
    return [range(end - size, end) for end, size in zip(ends, [*sizes, owner], strict=True)]


class Balance:
    """What owner and helpers do in a step besides computing, as time of so many micro-batches; seen from the owner."""

    def __init__(self, busy: float) -> None:
        """``busy``: the owner's, as far as it is known before anyone has helped."""
        self._busy = busy
        self._extra = 0.0
        """A helper's: taking parameters in, giving sums away."""

    @property
    def lead(self) -> float:
        """How much more of it the owner has than each helper."""
        return self._busy - self._extra

    def took(self, count: int, helpers: int, *, own: int, busy: float, waited: float) -> None:
        """Learn from a step in which the owner computed ``own`` of ``count``, and waited for the helpers in the end."""
        self._busy = busy
        extra = max(own + busy + waited - (count - own) / helpers, 0.0)
        # whoever did not wait does not know by how much the helpers were faster
        self._extra = extra if waited > NOTHING else min(self._extra, extra)


NOTHING = 0.1
"""Waiting for less than this of a micro-batch's time is no waiting."""


@dataclass(frozen=True)
class Room:
    """A host, by a name that no other one has, and how many ranks can compute on it at once."""

    host: str
    ranks: int


def fitting(owner: Room, helpers: Sequence[tuple[int, Room]]) -> list[int]:
    """Return the helpers that have cores to compute on while the others compute on theirs."""
    taken = {owner.host: 1}
    found = []
    for rank, room in helpers:
        before = taken.get(room.host, 0)
        if before < max(room.ranks, 1):
            taken[room.host] = before + 1
            found.append(rank)
    return found


WORTH_CHANGING = 0.9
"""A step must take less than this of what it took with another number of helpers: single steps vary."""


class TeamSize:
    """Finds out how many helpers pay, by trying: those that have cores of their own, then all; none if none does.

    If all have cores of their own, half as many are tried after that, as long as that is faster: they may share a slow
    network, or memory's bandwidth.
    """

    def __init__(self, most: int, alone_s: float, *, fitting: int | None = None, fixed: int | None = None) -> None:
        """``fixed``: so many help, whatever it costs."""
        self._best = 0 if fixed is None else min(fixed, most)
        self._best_s = alone_s
        self._most = most
        self._warm = False
        self._all_fit = fitting is None or fitting >= most
        first = most if self._all_fit else max(fitting or 0, 1)
        self._trying: int | None = first if most > 0 and fixed is None else None

    @property
    def helpers(self) -> int:
        """How many are to help in the next step."""
        return self._best if self._trying is None else self._trying

    @property
    def nobody(self) -> bool:
        """Whether it is settled that nobody helps."""
        return self._trying is None and self._best == 0

    def took(self, seconds: float) -> None:
        """Say how long the step took with that many."""
        if self._trying is None:
            return
        if not self._warm:
            self._warm = True  # memory was touched for the first time, connections were made
            return
        tried, self._trying = self._trying, None
        faster = seconds < self._best_s * (1.0 if self._best == 0 else WORTH_CHANGING)
        if faster:
            self._best, self._best_s = tried, seconds
        if not self._all_fit:
            self._trying = self._most if tried < self._most else None
        elif faster and tried > 1:
            self._trying = tried // 2
