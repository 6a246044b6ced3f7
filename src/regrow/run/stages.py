"""What a rank of a pipeline needs beyond a replica: a journal, checkpoints, and a way to replay.

Ties them to the run: a checkpoint at the start of every so many steps, its commit when all ranks have written theirs,
the journal dropped then and not before, and what this rank holds of all that when a plan is made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.courier import Address, Courier
from regrow.errors import LinkLost, PeerLost
from regrow.group import MESSAGES, Fabric
from regrow.ids import Rank, Step
from regrow.journal import Journal, Server
from regrow.plan import Plan, Replay
from regrow.rules import Rules, Source
from regrow.run.checkpointing import Checkpointing
from regrow.run.commits import Checkpoints
from regrow.run.contact import Contact, to_be_made_again
from regrow.run.copies import Host
from regrow.run.helping import BuildStage, Helper, Line
from regrow.run.link import Link
from regrow.run.meter import Meter, link_rate
from regrow.run.roles import Roles
from regrow.run.sharing import Sharing
from regrow.run.transport import Transport
from regrow.state import image
from regrow.state.registry import Registry


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
    ranks_here: int
    """How many ranks share this host's memory."""
    host: Host | None
    """Where snapshots of other hosts' ranks are kept; ``None``: there is but one host."""
    snapshot_every: int | None
    """After how many steps another one is taken; ``None``: as often as the network allows."""
    ckpt: Checkpointing | None
    """Where checkpoints of the whole job go to; ``None``: there are none."""
    rules: Rules
    """What was said of how a loss is met."""

    def domain(self, rank: int) -> str:
        """Return the name of what fails together with a rank of this node."""
        if not self.rules.heals:
            return "everyone"  # nothing is replayed, and so nothing journaled
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
        self._world = len(roles.stages)
        self._checkpoint_every = checkpoint_every
        self._heals = place.rules.heals
        stage = roles.stages[rank]
        assert stage is not None
        self.stage = stage
        self._has_replicas = len(roles.replicas(rank)) > 1
        self.domain = roles.domains[rank]
        self._spill = place.scratch / f"journal-{roles.nonce}-{rank}"
        shutil.rmtree(self._spill, ignore_errors=True)  # a predecessor's, which died with it
        self._journal = Journal(self._spill, memory_bytes=place.journal_bytes, on_event=self._journal_event)
        self._server = Server(self._journal, place.host_addr, place.token, self._say)
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
        self.checkpoints = Checkpoints(
            Path(checkpoint_dir) if checkpoint_dir is not None else place.scratch,
            rank,
            roles,
            every=checkpoint_every,
            link=link,
            registry=registry,
            on_committed=self._committed,
            say=self._say,
            event=self._event,
        )
        self._told = False
        self._gave_up = False
        self._link_rate: float | None = None
        if replacement:
            self.checkpoints.take_over()
        self._build_stage = build_stage
        self._line = Line(courier, fabric.timeout)
        self._helping: Rank | None = None
        self._cannot_help = False
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
            "checkpoints": tuple(self.checkpoints.usable()),
            "journal_from": Step(self._journal.kept_from),
            "recent_from": self.transport.recent_from,
            "shares": self._sharing is not None and not self._sharing.why_not and not self._cannot_help,
            "damaged": tuple(sorted(self.transport.damaged)),
        }

    def rates(self) -> dict[Source, float | None]:
        """Return how many bytes a second this rank's checkpoints were written at, and messages come."""
        return {Source.ROLLBACK: self.checkpoints.bytes_s, Source.REPLICA: self._link_rate}

    def envelope(self) -> dict[str, Any]:
        """Return what others must know besides: where the journal is, and which first contacts were made."""
        return {
            "journal": list(self._server.address),
            "courier": list(self._courier.address),
            "contacts": [(contact.made, contact.step) for contact in self.contacts],
        }

    def resume(self, generation: int, plan: Plan, envelopes: Sequence[dict[str, Any]]) -> None:
        """All ranks know where all go on."""
        positions = plan.positions
        for number, contact in enumerate(self.contacts):
            told = [envelope["contacts"][number] for envelope in envelopes if number < len(envelope["contacts"])]
            if to_be_made_again(told, positions):
                contact.again()
        self._courier.resume(generation, [_address(envelope["courier"]) for envelope in envelopes])
        self.transport.resume(generation, positions, [_address(envelope["journal"]) for envelope in envelopes])
        replays = [action for action in plan.actions if isinstance(action, Replay)]
        self._helping = next((action.rank for action in replays if self._rank in action.helpers), None)
        if self._sharing is not None:
            mine = next((action for action in replays if action.rank == self._rank), None)
            self._sharing.begin(*((mine.helpers, mine.alone_from) if mine is not None else ((), None)))

    def begin_anew(self, step: Step) -> None:
        """All have gone on with a state that never was: nothing older leads to it."""
        self._journal.drop_before(step)
        self.checkpoints.forget_all()

    def help(self) -> None:
        """Help another rank with its replay, if the plan says so, until it needs no more."""
        owner, self._helping = self._helping, None
        if owner is not None:
            assert self._build_stage is not None
            try:
                with self._preserving():
                    Helper(self._line, owner, self._build_stage).serve()
            except PeerLost:
                raise
            except Exception as error:  # whatever happens to a helper, its own state is whole
                self._cannot_help = True
                self._say(f"this rank helps no more: {type(error).__name__}: {error}")
                raise PeerLost(f"rank {self._rank} cannot help rank {owner}: {error}") from error

    def begin(self, step: Step, small: image.Small) -> None:
        """A step begins."""
        if self._heals:  # else everyone goes back to a checkpoint of the whole job
            self.checkpoints.at_start(step, small)
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
            checkpoint_every=self._checkpoint_every,
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

    def first(self, step: Step, small: image.Small) -> None:
        """Write the first checkpoint, of the step at which the run begins.

        Before that, while the disk is at rest, see how fast messages are.
        """
        rate = self._link_rate = link_rate(self._courier, self._rank, self._world, self._fabric.timeout)
        before = (self._rank - 1) % self._world
        self._event("link_rate", pipeline=self._roles.nonce, peer=before, bytes_per_s=rate)
        if self._heals:
            self.checkpoints.first(step, small)
        if step > 0:
            self.transport.move(step)

    def _committed(self, step: Step) -> None:
        self._gave_up = False
        self._journal.drop_before(step)

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

        return Contact(
            schedule,
            self._fabric,
            record=record,
            keep=keep,
            preserving=self._preserving,
            now=lambda: self.transport.step,
        )

    def _journal_event(self, name: str, **fields: Any) -> None:
        self._event(name, **fields)
        if name == "journal_given_up" and self._gave_up:
            return
        if name == "journal_given_up":
            self._gave_up = True
            back = self.checkpoints.last_committed
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
        self.checkpoints.close()
        self.transport.close()
        self._courier.close()
        self._server.close()
        self._journal.close()
        shutil.rmtree(self._spill, ignore_errors=True)
