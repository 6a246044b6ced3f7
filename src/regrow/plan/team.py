"""Who computes which micro-batches of a shared replay, and how many help. Pure: times in, decisions out."""

from __future__ import annotations


def slices(count: int, members: int) -> list[range]:
    """Divide micro-batches among members, in order; the last one, which has more to do besides, gets the least."""
    each, more = divmod(count, members)
    found, at = [], 0
    for member in range(members):
        size = each + (member < more)
        found.append(range(at, at + size))
        at += size
    return found


class TeamSize:
    """Finds out how many helpers pay: all at first, then half as many as long as that is faster; none if none is.

    Ranks that share a machine's cores, or a slow network, help less than they cost.
    """

    def __init__(self, most: int, alone_s: float, *, fixed: int | None = None) -> None:
        """``fixed``: so many help, whatever it costs."""
        self._best = 0 if fixed is None else min(fixed, most)
        self._best_s = alone_s
        self._trying: int | None = most if most > 0 and fixed is None else None

    @property
    def helpers(self) -> int:
        """How many are to help in the next step."""
        return self._best if self._trying is None else self._trying

    def took(self, seconds: float) -> None:
        """Say how long the step took with that many."""
        if self._trying is None:
            return
        tried, self._trying = self._trying, None
        if seconds < self._best_s:
            self._best, self._best_s = tried, seconds
            if tried > 1:
                self._trying = tried // 2
