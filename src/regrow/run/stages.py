"""What a rank of a pipeline needs beyond a replica: a journal, checkpoints, and a way to replay.

Ties them to the run: a checkpoint at the start of every so many steps, its commit when all ranks have written theirs,
the journal dropped then and not before, and what this rank holds of all that when a plan is made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow import testing
from regrow.courier import Address, Courier
from regrow.errors import LinkLost, PeerLost, Unrecoverable
from regrow.group import MESSAGES, Fabric
from regrow.ids import Rank, Step
from regrow.journal import Journal, Server
from regrow.plan import Plan, Replay
from regrow.run.contact import Contact
from regrow.run.helping import BuildStage, Helper, Line
from regrow.run.link import Link
from regrow.run.meter import Meter, link_rate
from regrow.run.roles import Roles
from regrow.run.sharing import Sharing
from regrow.run.transport import Transport
from regrow.state import checkpoint
from regrow.state.registry import Registry

_COMMIT_S = 600.0
_FIRST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank is, and what its launcher said about failures."""

    host_addr: str
    token: str
    node: int
    failure_domain: str
    scratch: Path
    journal_bytes: int
    replay_helpers: int | None

    def domain(self, rank: int) -> str:
        """Return the name of what fails together with a rank of this node."""
        match self.failure_domain:
            case "host":
                return f"host {self.node}"
            case "rank":
                return f"rank {rank}"
            case groups:
                for number, members in enumerate(parse_groups(groups)):
                    if rank in members:
                        return f"group {number}"
                raise ValueError(f"--failure-domain {groups}: rank {rank} is in none of these groups")


def parse_groups(text: str) -> list[set[int]]:
    """Read groups of ranks: ``0-1,2,3-5``."""
    groups = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        groups.append(set(range(int(first), int(last or first) + 1)))
    return groups


def _address(given: Sequence[Any]) -> Address:
    return str(given[0]), int(given[1])


class Stages:
    """The part of a run that only pipelines have."""

    def __init__(
        self,
        *,
        rank: Rank,
        roles: Roles,
        place: Place,
        link: Link,
        fabric: Fabric,
        courier: Courier,
        registry: Registry,
        preserving: Callable[[], AbstractContextManager[None]],
        schedules: Sequence[Any],
        build_stage: BuildStage | None,
        checkpoint_dir: str | os.PathLike[str] | None,
        checkpoint_every: int,
        replacement: bool,
    ) -> None:
        self._rank = rank
        self._roles = roles
        self._link = link
        self._fabric = fabric
        self._preserving = preserving
        self._every = checkpoint_every
        self._world = len(roles.stages)
        stage = roles.stages[rank]
        assert stage is not None
        self.stage = stage
        self._has_replicas = len(roles.replicas(rank)) > 1
        self.domain = roles.domains[rank]
        # a name of its own: what an earlier run has left in the same place must never be taken for this one's
        base = Path(checkpoint_dir) if checkpoint_dir is not None else place.scratch
        self._directory = base / f"regrow-{roles.nonce}" / f"rank{rank}"
        self._spill = place.scratch / f"journal-{roles.nonce}-{rank}"
        shutil.rmtree(self._spill, ignore_errors=True)  # a predecessor's, which died with it
        self._journal = Journal(self._spill, memory_bytes=place.journal_bytes, on_event=self._journal_event)
        self._server = Server(self._journal, place.host_addr, place.token)
        self._courier = courier
        courier.resume(fabric.generation, roles.addresses)
        self.transport = Transport(
            rank,
            self._journal,
            courier,
            stages=[stage for stage in roles.stages if stage is not None],
            domains=roles.domains,
            token=place.token,
        )
        self.transport.on_caught_up = self._caught_up
        self.transport.superseded = lambda: link.generation != fabric.generation
        self._meter = Meter()
        self._writer = checkpoint.Writer(self._directory, registry, self._written)
        self._bad: dict[Step, str] = {}
        self._settled = threading.Lock()  # several commits may end at once
        self._committed: list[Step] = []
        self._refused: set[Step] = set()
        """Checkpoints that somebody could not write: they serve for the loss of this rank alone."""
        self._told = False
        self._gave_up = False
        if replacement:
            for step in checkpoint.saved(self._directory):
                self._verify(step)
                if self._is_committed(step):
                    self._committed.append(step)
        self._build_stage = build_stage
        self._line = Line(courier, fabric.timeout)
        self._helping: Rank | None = None
        self._sharing: Sharing | None = None
        if build_stage is not None and len(schedules) == 1 and place.replay_helpers != 0:
            self._sharing = Sharing(
                schedules[0],
                rank,
                line=self._line,
                transport=self.transport,
                helpers=place.replay_helpers,
                say=self._say,
                event=self._event,
            )
        self.contacts = [self._contact(schedule, n, replacement) for n, schedule in enumerate(schedules)]

    # what is held ----------------------------------------------------------------------------------------------------

    def holding(self) -> dict[str, Any]:
        """Return the fields of a holding that pipelines add."""
        return {
            "stage": self.stage,
            "domain": self.domain,
            "checkpoints": tuple(self._usable()),
            "journal_from": Step(self._journal.kept_from),
            "recent_from": self.transport.recent_from,
            "shares": self._sharing is not None and not self._sharing.why_not,
            "damaged": tuple(sorted(self.transport.damaged)),
        }

    def envelope(self) -> dict[str, Any]:
        """Return what others must know besides: where the journal is, and which first contacts were made."""
        return {
            "journal": list(self._server.address),
            "courier": list(self._courier.address),
            "contacts": [contact.made for contact in self.contacts],
        }

    def resume(self, generation: int, plan: Plan, envelopes: Sequence[dict[str, Any]]) -> None:
        """All ranks know where all go on."""
        positions = plan.positions
        for number, contact in enumerate(self.contacts):
            made = [envelope["contacts"][number] for envelope in envelopes if number < len(envelope["contacts"])]
            if all(made) or not any(made):
                continue
            if max(positions) > 0:
                raise Unrecoverable("a stage was lost in its first contact with the others, but some have gone on")
            contact.again()
        self._courier.resume(generation, [_address(envelope["courier"]) for envelope in envelopes])
        self.transport.resume(generation, positions, [_address(envelope["journal"]) for envelope in envelopes])
        replays = [action for action in plan.actions if isinstance(action, Replay)]
        self._helping = next((action.rank for action in replays if self._rank in action.helpers), None)
        if self._sharing is not None:
            mine = next((action for action in replays if action.rank == self._rank), None)
            self._sharing.begin(*((mine.helpers, mine.alone_from) if mine is not None else ((), None)))

    def help(self) -> None:
        """Help another rank with its replay, if the plan says so, until it needs no more."""
        owner, self._helping = self._helping, None
        if owner is not None:
            assert self._build_stage is not None
            with self._preserving():
                Helper(self._line, owner, self._build_stage).serve()

    def begin(self, step: Step) -> None:
        """A step begins."""
        self._meter.begin(time.monotonic(), self.transport.waited_s)
        self.transport.begin(step)

    def complete(self) -> None:
        """The step is complete."""
        self.transport.complete()
        if not self.transport.replaying:
            now_s = time.monotonic()
            self._meter.complete(now_s, self.transport.waited_s, self.transport.sent)
            if self._meter.due(now_s):
                self._tell_profile()
        if self._sharing is not None:
            self._sharing.completed(self.transport.step)

    def _tell_profile(self) -> None:
        self._event(
            "stage_profile",
            pipeline=self._roles.nonce,
            world=self._world,
            stage=self.stage,
            checkpoint_every=self._every,
            **self._meter.totals(),
        )

    def sever(self, *, below: int) -> None:
        """Generations before this one are over. From any thread; quick."""
        self._courier.sever(below=below)

    @property
    def waiting(self) -> bool:
        """Whether this rank waits for a message."""
        return self._courier.waiting

    def publishes(self, op: str) -> bool:
        """Whether a replica may complete the step by this operation, so that a replacement needs what was drawn so far.

        Without replicas it takes all that from the checkpoint.
        """
        return self._has_replicas and op not in MESSAGES

    def abandon(self) -> None:
        """Forget an interrupted step."""
        for contact in self.contacts:
            contact.abandon()

    # checkpoints -----------------------------------------------------------------------------------------------------

    def first(self, small: checkpoint.Small) -> None:
        """Write the first checkpoint, before anyone hears that the set-up is done: from then on it may be needed.

        Training goes on without it where it cannot be written, and that is said. Before that, while all are here and
        the disk is at rest, see how fast messages are.
        """
        rate = link_rate(self._courier, self._rank, self._world, self._fabric.timeout)
        before = (self._rank - 1) % self._world
        self._event("link_rate", pipeline=self._roles.nonce, peer=before, bytes_per_s=rate)
        self._writer.save(Step(0), small)
        if not self._writer.wait(_FIRST_S):
            self._say(f"the first checkpoint is not written after {_FIRST_S:.0f} s; {self._what_a_loss_costs()}")

    def at_start(self, step: Step, small: checkpoint.Small) -> None:
        """Take a checkpoint if one is due at the start of this step."""
        if step == 0 or step % self._every or (step in self._committed and step not in self._bad):
            return
        if self._writer.busy:
            self._event("checkpoint_skipped", step=step, why="the one before is still being written")
            self._in_background(self._refuse, step)
            return
        began = time.monotonic()
        self._writer.save(step, small)
        self._event("checkpoint_taken", step=step, seconds=time.monotonic() - began)

    def read(self, step: Step) -> checkpoint.Saved:
        """Read this rank's checkpoint; a damaged one is named, and not counted on again."""
        try:
            return checkpoint.read(self._directory, step)
        except checkpoint.DamagedCheckpoint as error:
            self._distrust(step, error)
            raise PeerLost(str(error)) from error

    def _verify(self, step: Step) -> None:
        try:
            checkpoint.read(self._directory, step)
        except checkpoint.DamagedCheckpoint as error:
            self._distrust(step, error)

    def _distrust(self, step: Step, error: Exception) -> None:
        self._bad[step] = str(error)
        self._say(f"{error}; it is not used")
        self._event("checkpoint_damaged", step=step, why=str(error))

    def _written(self, step: Step, nbytes: int, seconds: float) -> None:
        """In the writer's thread: this rank's part is on storage, or could not be put there."""
        if nbytes < 0:
            self._say(f"{self._writer.failure}; {self._what_a_loss_costs()}")
            self._event("checkpoint_failed", step=step, why=self._writer.failure)
            self._refuse(step)
            return
        testing.point("checkpoint_written", step)
        self._bad.pop(step, None)
        self._tidy()
        self._event("checkpoint_written", step=step, bytes=nbytes, seconds=seconds)
        self._in_background(self._commit, step)

    def _in_background(self, target: Callable[[Step], None], step: Step) -> None:
        threading.Thread(target=target, args=(step,), name="regrow-commit", daemon=True).start()

    def _usable(self) -> list[Step]:
        return [step for step in checkpoint.saved(self._directory) if step not in self._bad]

    def _what_a_loss_costs(self) -> str:
        alone = " with all its replicas" if self._has_replicas else ""
        usable = self._usable()
        return "until one is, " + (
            f"this stage goes back to step {usable[-1]} if it is lost{alone}"
            if usable
            else f"the run cannot go on if this stage is lost{alone}"
        )

    # A checkpoint is committed when every rank has put its part on storage, or never if one could not: that one says so
    # first, and only then that it is done, so that all come to the same end.

    def _keys(self, step: Step) -> tuple[list[str], str]:
        """Return what each rank sets in the store when it is done, and what is set before if one has not succeeded."""
        prefix = self._prefix(step)
        return [f"{prefix}{rank}" for rank in range(self._world)], f"{prefix}refused"

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
        done, _ = self._keys(step)
        try:
            self._ask("set", key=done[self._rank])
            self._ask("wait", keys=done, timeout_s=_COMMIT_S)
            committed = self._is_committed(step)
        except (TimeoutError, LinkLost):
            return
        if not committed:
            self._refused.add(step)
            self._tidy()
            self._event("checkpoint_refused", step=step)
            return
        testing.point("checkpoint_commit", step)
        self._committed.append(step)
        self._gave_up = False
        self._journal.drop_before(step)
        self._tidy()
        self._event("checkpoint_committed", step=step)

    def _tidy(self) -> None:
        """Delete the checkpoints that nobody will ask for."""
        with self._settled:
            for step in checkpoint.superseded(self._usable(), self._committed, self._refused):
                self._writer.remove(step)
                if step < max(self._committed, default=Step(0)):  # everyone has got beyond it
                    with contextlib.suppress(LinkLost):
                        self._link.send({"type": "kv_purge", "prefix": self._prefix(step)})

    def _caught_up(self, first: Step, last: Step, nbytes: int, seconds: float) -> None:
        self._event(
            "replayed", generation=self._fabric.generation, first=first, last=last, bytes_in=nbytes, seconds=seconds
        )

    # the rest --------------------------------------------------------------------------------------------------------

    def _contact(self, schedule: Any, number: int, replacement: bool) -> Contact:
        key = f"contact/{self._roles.nonce}/{self._rank}/{number}"
        record = None
        if replacement:
            there = self._link.ask({"type": "store", "op": "check", "keys": [key]}, timeout_s=30.0)
            if there.head.get("value"):
                record = self._link.ask(
                    {"type": "store", "op": "get", "key": key, "timeout_s": 10}, timeout_s=30.0
                ).blob

        def keep(made: bytes) -> None:
            self._link.ask({"type": "store", "op": "set", "key": key}, made, timeout_s=30.0)

        return Contact(schedule, self._fabric, record=record, keep=keep, preserving=self._preserving)

    def _journal_event(self, name: str, **fields: Any) -> None:
        self._event(name, **fields)
        if name == "journal_given_up" and self._gave_up:
            return
        if name == "journal_given_up":
            self._gave_up = True
            back = max(self._committed, default=None)
            self._say(
                f"the journal gives up what was sent through step {fields['through_step']} and later ones in turn "
                f"({fields['why']}): until the next checkpoint is committed, a lost stage "
                + ("cannot be healed" if back is None else f"takes everyone back to step {back}")
            )
        elif not self._told:
            self._told = True
            self._say(f"the journal's disk is too slow: a step waited {fields['seconds']:.2f} s for it")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log that cannot be written is no reason to end a thread
            print(f"[regrow] rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def _event(self, name: str, **fields: Any) -> None:
        with contextlib.suppress(LinkLost):  # the watcher thread ends the process for that
            self._link.send({"type": "event", "event": name, "t": time.time(), **fields})

    def close(self) -> None:
        """All ranks are done: nothing of this is needed any more."""
        self._tell_profile()
        self._writer.wait(10.0)
        self.transport.close()
        self._courier.close()
        self._server.close()
        self._journal.close()
        shutil.rmtree(self._spill, ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._directory.parent.rmdir()  # by whoever is the last
