"""The checkpoints of one rank of a pipeline: taken at a step's start, committed when every rank has written its own.

A checkpoint is committed when every rank has put its part on storage, or never if one could not: that one says so
first, and only then that it is done, so that all come to the same end.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow import testing
from regrow.errors import LinkLost, PeerLost
from regrow.ids import Rank, Step
from regrow.run.link import Link
from regrow.run.roles import Roles
from regrow.state import checkpoint, image
from regrow.state.registry import Registry

_COMMIT_S = 600.0
_AGAIN_S = 1.0
_FIRST_S = 600.0

Say = Callable[[str], None]
Event = Callable[..., None]


class Checkpoints:
    """Writes, commits, reads and deletes them. ``on_committed(step)``: nobody needs what was sent before that step."""

    def __init__(
        self,
        base: Path,
        rank: Rank,
        roles: Roles,
        *,
        every: int,
        link: Link,
        registry: Registry,
        on_committed: Callable[[Step], None],
        say: Say,
        event: Event,
    ) -> None:
        self._rank = rank
        self._roles = roles
        self._every = every
        self._link = link
        self._on_committed = on_committed
        self._say = say
        self._event = event
        self._has_replicas = len(roles.replicas(rank)) > 1
        # a name of its own: what an earlier run has left in the same place must never be taken for this one's
        self._directory = base / f"regrow-{roles.nonce}" / f"rank{rank}"
        self._writer = checkpoint.Writer(self._directory, registry, self._written)
        self.bytes_s: float | None = None
        """At how many bytes a second the last one was written."""
        self._bad: dict[Step, str] = {}
        self._under_way: set[Step] = set()
        """Those being written, or written and not committed yet: a step that begins again has its checkpoint."""
        self._closing = threading.Event()
        self._settled = threading.Lock()  # several commits may end at once
        self._committed: list[Step] = []
        self._refused: set[Step] = set()
        """Checkpoints that somebody could not write: they serve for the loss of this rank alone."""
        self._at_once = False

    def take_over(self) -> None:
        """This is a replacement: see what its predecessor has left."""
        for step in checkpoint.saved(self._directory):
            self._verify(step)
            if self._is_committed(step):
                self._committed.append(step)

    @property
    def last_committed(self) -> Step | None:
        """The newest one that every rank has."""
        return max(self._committed, default=None)

    def usable(self) -> list[Step]:
        """Return the steps whose checkpoints this rank has, as far as it knows whole."""
        return [step for step in checkpoint.saved(self._directory) if step not in self._bad]

    def first(self, step: Step, small: image.Small) -> None:
        """Write the first one, before anyone hears that the set-up is done: from then on it may be needed.

        Training goes on without it where it cannot be written, and that is said.
        """
        self._save(step, small)
        if not self._writer.wait(_FIRST_S):
            self._say(f"the first checkpoint is not written after {_FIRST_S:.0f} s; {self._what_a_loss_costs()}")

    def at_start(self, step: Step, small: image.Small) -> None:
        """Take a checkpoint if one is due at the start of this step."""
        lacking = step not in self._under_way and (step not in self._committed or step in self._bad)
        due = step != 0 and step % self._every == 0 and lacking
        if not due and not self._at_once:
            return
        if self._writer.busy:
            self._event("checkpoint_skipped", step=step, why="the one before is still being written")
            self._in_background(self._refuse, step)
            return
        began = time.monotonic()
        self._at_once = False
        self._save(step, small)
        self._event("checkpoint_taken", step=step, seconds=time.monotonic() - began)

    def _save(self, step: Step, small: image.Small) -> None:
        self._under_way.add(step)
        self._writer.save(step, small)

    def forget_all(self) -> None:
        """The state is none that these lead to: remove them, and take another one at once."""
        self._writer.wait(_FIRST_S)
        with self._settled:
            for step in checkpoint.saved(self._directory):
                self._writer.remove(step)
            self._committed.clear()
            self._under_way.clear()
        self._at_once = True

    def read(self, step: Step) -> image.Image:
        """Read this rank's checkpoint; a damaged one is named, and not counted on again."""
        try:
            return checkpoint.read(self._directory, step)
        except image.Damaged as error:
            self._distrust(step, error)
            raise PeerLost(str(error)) from error

    def _verify(self, step: Step) -> None:
        try:
            checkpoint.read(self._directory, step)
        except image.Damaged as error:
            self._distrust(step, error)

    def _distrust(self, step: Step, error: Exception) -> None:
        self._bad[step] = str(error)
        self._under_way.discard(step)
        self._say(f"{error}; it is not used")
        self._event("checkpoint_damaged", step=step, why=str(error))

    def _written(self, step: Step, nbytes: int, seconds: float) -> None:
        """In the writer's thread: this rank's part is on storage, or could not be put there."""
        if nbytes < 0:
            self._say(f"{self._writer.failure}; {self._what_a_loss_costs()}")
            self._event("checkpoint_failed", step=step, why=self._writer.failure)
            self._under_way.discard(step)
            self._refuse(step)
            return
        testing.point("checkpoint_written", step)
        self._bad.pop(step, None)
        self.bytes_s = nbytes / max(seconds, 0.01)  # finer than that, it is not measured
        self._tidy()
        self._event("checkpoint_written", step=step, bytes=nbytes, seconds=seconds)
        self._in_background(self._commit, step)

    def _in_background(self, target: Callable[[Step], None], step: Step) -> None:
        threading.Thread(target=target, args=(step,), name="regrow-commit", daemon=True).start()

    def _what_a_loss_costs(self) -> str:
        alone = " with all its replicas" if self._has_replicas else ""
        usable = self.usable()
        return "until one is, " + (
            f"this stage goes back to step {usable[-1]} if it is lost{alone}"
            if usable
            else f"the run cannot go on if this stage is lost{alone}"
        )

    # the commit ------------------------------------------------------------------------------------------------------

    def _keys(self, step: Step) -> tuple[list[str], str]:
        """Return what each rank sets in the store when it is done, and what is set before if one has not succeeded."""
        prefix = self._prefix(step)
        return [f"{prefix}{rank}" for rank in range(len(self._roles.stages))], f"{prefix}refused"

    def _prefix(self, step: Step) -> str:
        return f"checkpoint/{self._roles.nonce}/{step}/"

    def _ask(self, op: str, *, timeout_s: float = 30.0, **fields: Any) -> Any:
        request = {"type": "store", "op": op, "timeout_s": timeout_s, **fields}
        reply = self._link.ask(request, timeout_s=timeout_s + 10).head
        if not reply["ok"]:
            raise TimeoutError(reply["error"])
        return reply["value"]

    def _is_committed(self, step: Step) -> bool:
        done, refused = self._keys(step)
        # in this order: the keys of an old checkpoint are all deleted at once
        return not self._ask("check", keys=[refused]) and bool(self._ask("check", keys=done))

    def _refuse(self, step: Step) -> None:
        """Let nobody wait for this rank's part, nor count on it."""
        done, refused = self._keys(step)
        with contextlib.suppress(TimeoutError, LinkLost):
            self._ask("set", key=refused)
            self._ask("set", key=done[self._rank])

    def _commit(self, step: Step) -> None:
        """Wait until every rank has written its part; from then on nobody needs what was sent before."""
        committed = self._agreed(step)
        if committed is None:
            self._under_way.discard(step)
            return
        if not committed:
            self._refused.add(step)
            self._under_way.discard(step)
            self._tidy()
            self._event("checkpoint_refused", step=step)
            return
        testing.point("checkpoint_commit", step)
        self._committed.append(step)
        self._under_way.discard(step)
        self._on_committed(step)
        self._tidy()
        self._event("checkpoint_committed", step=step)

    def _agreed(self, step: Step) -> bool | None:
        """Wait until every rank is done with its part; whether all have one; ``None`` if nobody asks any more.

        However long it takes: a rank that replays comes to this step late, and if it were then the only one to count it
        as committed, the ranks would not keep the same checkpoints.
        """
        done, _ = self._keys(step)
        while not self._closing.is_set() and step in self._under_way and step >= max(self._committed, default=step):
            try:
                self._ask("set", key=done[self._rank])
                self._ask("wait", keys=done, timeout_s=_COMMIT_S)
                committed = self._is_committed(step)
                return committed if step in self._under_way else None  # all may have begun anew meanwhile
            except TimeoutError:
                self._closing.wait(_AGAIN_S)  # a store that is not there for a moment answers at once
            except LinkLost:
                break
        return None

    def _tidy(self) -> None:
        """Delete the checkpoints that nobody will ask for."""
        with self._settled:
            for step in checkpoint.superseded(self.usable(), self._committed, self._refused):
                self._writer.remove(step)
                if step < max(self._committed, default=Step(0)):  # everyone has got beyond it
                    with contextlib.suppress(LinkLost):
                        self._link.send({"type": "kv_purge", "prefix": self._prefix(step)})

    def close(self) -> None:
        """All ranks are done: nothing of this is needed any more."""
        self._closing.set()
        self._writer.wait(10.0)
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._directory.parent.rmdir()  # by whoever is the last
