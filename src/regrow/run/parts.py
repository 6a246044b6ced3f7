"""What a rank keeps of its state beside the training, as far as its job needs it; the run tells all of it the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regrow.ids import Step
from regrow.run.mirror import MirroredSlots
from regrow.run.roles import Roles
from regrow.run.rounds import Rounds
from regrow.run.snapshots import Snapshots
from regrow.run.stages import Stages
from regrow.state import image

if TYPE_CHECKING:
    from regrow.run.disk import Disk

Small = Callable[[], image.Small]
"""Returns what the start of this step needs besides tensors."""


@dataclass
class Parts:
    """Each is ``None`` where the job does without it."""

    stages: Stages | None = None
    """Journal and checkpoints of a pipeline."""
    snapshots: Snapshots | None = None
    """Of sharded state, in the memory of hosts."""
    mirror: MirroredSlots | None = None
    """Of small state alone, in the memory of another host."""
    disk: Disk | None = None
    """Checkpoints of the whole job on storage."""
    rounds: Rounds | None = None
    """The running checkpoint that may be recovered from in part."""

    @property
    def waiting(self) -> bool:
        """Whether the training waits for one of them, and so perhaps for other ranks."""
        return any(part is not None and part.waiting for part in (self.stages, self.snapshots, self.disk))

    def first(self, generation: int, step: Step, small: Small, roles: Roles, *, saved: bool) -> None:
        """The run begins at this step, with a checkpoint of it on storage if it is ``saved``."""
        if self.disk is not None:
            self.disk.first(generation, step, saved=saved)
        if self.stages is not None:
            self.stages.first(step, small())
        if self.mirror is not None:
            self.mirror.first(generation, step, roles.hosts)
        if self.snapshots is not None:
            self.snapshots.first(generation, step, small(), roles)
        if self.rounds is not None:
            self.rounds.first(step)

    def begin(self, step: Step, small: Small) -> None:
        """A step begins: what is due at its start is taken of it.

        Raises:
            PeerLost: the generation has ended meanwhile, or what this step needs is not there.
        """
        if self.stages is not None:
            self.stages.begin(step, small())
        if self.rounds is not None:
            self.rounds.begin(step)
        if self.snapshots is not None:
            self.snapshots.begin(step, small())
        if self.disk is not None:
            self.disk.begin(step, small)

    def settle(self) -> None:
        """Parameters are about to change: wait until what copies them has done so."""
        if self.snapshots is not None:
            self.snapshots.settle()
        if self.disk is not None:
            self.disk.settle()

    def sever(self, *, below: int) -> None:
        """Generations before this one are over: wake whoever waits for the others. From any thread; quick."""
        for part in (self.stages, self.snapshots, self.disk):
            if part is not None:
                part.sever(below=below)
        if self.mirror is not None:
            self.mirror.sever()

    def close(self) -> None:
        """All ranks are done: nothing of this is needed any more."""
        for part in (self.stages, self.snapshots, self.disk, self.rounds, self.mirror):
            if part is not None:
                part.close()
