"""Find a checkpoint that every rank can read, and open it: all ranks look together, each at a share of its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from regrow.disk import marks
from regrow.disk.content import Names, Where
from regrow.disk.saved import Saved, open_saved
from regrow.disk.storage import Storage
from regrow.errors import PeerLost
from regrow.ids import Rank, Step
from regrow.run.gather import gather_json
from regrow.state import image, resized
from regrow.state.registry import Registry

_NEWEST = 16
"""So many are told of."""
_TRIES = 3
_AGAIN_AFTER_S = 1.0


class Finder:
    """Knows which checkpoints were found damaged."""

    def __init__(
        self,
        rank: Rank,
        world: int,
        storage: Storage,
        registry: Registry,
        names: Names,
        where: Where,
        *,
        say: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        self._rank = rank
        self._world = world
        self._storage = storage
        self._registry = registry
        self._names = names
        self._where = where
        self._say = say
        self._event = event
        self.damaged: set[Step] = set()
        """Steps of checkpoints that were found damaged."""

    def usable(self) -> list[Step]:
        """Return the steps of complete checkpoints that are not known to be damaged; none if they cannot be listed."""
        try:
            return self._listed()
        except OSError as error:
            self._say(f"checkpoints cannot be found: {error}")
            return []

    def _listed(self) -> list[Step]:
        return [step for step in marks.usable(self._storage) if step not in self.damaged]

    def committed(self, step: Step) -> None:
        """There is a new checkpoint of this step: what was found of an older one does not count any more."""
        self.damaged.discard(step)

    def find(self, *, listens: bool) -> Saved | None:
        """Open the newest one that every rank can read. ``listens``: this rank only follows a record of it.

        Raises:
            ValueError: some rank cannot see what there is. To begin anew instead would look as if there were nothing.
        """
        row: dict[str, Any] = {"steps": [], "trouble": None}
        if not listens:
            row = self._tried()
        rows = gather_json(row)
        for rank, each in enumerate(rows):
            if each["trouble"] is not None:
                raise ValueError(
                    f"rank {rank} cannot see which checkpoints there are in {self._storage} ({each['trouble']}): start "
                    "again when it can; nothing there was changed"
                )
        for step in sorted(set.intersection(*({*each["steps"]} for each in rows)), reverse=True):
            if self._intact(Step(step), listens=listens):
                return None if listens else self._open(Step(step))
        return None

    def _tried(self) -> dict[str, Any]:
        """Return the newest, or what is wrong; a storage that does not answer is asked again."""
        trouble = ""
        for number in range(_TRIES):
            if number:
                time.sleep(_AGAIN_AFTER_S)
            try:
                return {"steps": self._listed()[-_NEWEST:], "trouble": None}
            except OSError as error:
                trouble = str(error)[:300]
        return {"steps": [], "trouble": trouble}

    def read(self, step: Step) -> Saved:
        """Open this one; ``PeerLost`` on all ranks if any of them has found it damaged."""
        if not self._intact(step, listens=False):
            damaged = image.Damaged(f"the checkpoint of step {step} in {self._storage} is damaged")
            raise PeerLost(str(damaged)) from damaged
        return self._open(step)

    def _intact(self, step: Step, *, listens: bool) -> bool:
        """Whether all is as it was written. Known before anything is put in place: nobody is left with half of it."""
        wrong: list[str] = []
        if not listens:
            found = marks.look(self._storage, step)
            together = self._where.together
            mine = sorted(found.files)[together.index(self._rank) :: len(together)]
            wrong = [found.why_not] if found.why_not else marks.damage(self._storage, found, mine)
        said = [text for row in gather_json(wrong[:3]) for text in row]
        if said:
            self.damaged.add(step)
            for text in wrong:
                self._say(f"{text}; the checkpoint of step {step} is not used")
            self._event("disk_damaged", step=step, why=said)
        return not said

    def _open(self, step: Step) -> Saved:
        found = marks.look(self._storage, step)
        donor = resized.donor(self._rank, found.world) if found.world != self._world else None
        return open_saved(self._storage, found, self._registry, self._names, self._where, donor=donor)
