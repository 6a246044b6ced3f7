"""Stands between the script and the groups while a step of a pipeline runs: journals what is sent, replays what was.

A rank that goes on at an earlier step than another finds what that one has sent it in that one's journal, until it has
caught up: it runs the same step of the same script. To those behind or beside it, messages are live as ever. What it
sends to a rank that has had it already goes nowhere but into the journal, which is thus written anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regrow.courier import Address, Courier, memory_of
from regrow.errors import PeerLost
from regrow.group import HealingGroup, RecordedWork, ReplayedWork, outputs_of
from regrow.ids import Rank, Step
from regrow.journal import Channel, Damaged, Fetcher, Journal, Messages, Pin, Record

RECENT_STEPS = 2
"""For how many steps messages within a failure domain are kept: survivors may stand one step apart."""

ALIKE = frozenset({"allreduce", "broadcast", "allgather", "_allgather_base", "all_gather_single", "barrier"})
"""Collectives that give every member the same: whoever is ahead can tell what they gave."""

ALL = -1
CATCHES_UP_WITHIN = timedelta(days=7)
"""A replay may take longer than any message; whether the rank makes progress is the agents' to see."""
_NO_TIMEOUT = timedelta(0)


class Transport:
    """The messages of one rank. Used by the thread that trains, and by backward's."""

    def __init__(
        self,
        rank: Rank,
        journal: Journal,
        courier: Courier,
        *,
        stages: Sequence[int],
        domains: Sequence[str],
        token: str,
    ) -> None:
        self._rank = rank
        self._journal = journal
        self._courier = courier
        self._stages = stages
        self._domains = domains
        self._token = token
        self._positions: Sequence[Step] = [Step(0)] * len(stages)
        self._fetchers: dict[int, Fetcher] = {}
        self._step = Step(0)
        self._first = Step(0)
        self._generation = 0
        self._ahead: frozenset[int] = frozenset()
        self._others_behind = False
        """Whether somebody went on at an earlier step than this rank."""
        self._recorded: dict[int, Messages] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._pending: list[RecordedWork] = []
        self._pins: list[Pin] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._recent = Step(0)
        self.damaged: set[tuple[Rank, Step]] = set()
        """Journals that were found damaged, and the step of the record."""
        self._began = 0.0
        self.on_caught_up: Callable[[Step, Step, int, float], None] = lambda *_: None
        """Told when nobody is ahead any more: first and last step of the replay, bytes fetched, seconds."""
        self.superseded: Callable[[], bool] = lambda: False
        """Asked while a journal is waited for: whether a newer generation has begun."""
        self._replayed_bytes = 0
        self.sent: dict[int, int] = {}
        """Bytes that this step has sent to each rank, message by message; collectives are not counted."""
        self._waited_s = 0.0

    # generations and steps -------------------------------------------------------------------------------------------

    def resume(self, generation: int, positions: Sequence[Step], addresses: Sequence[Address]) -> None:
        """A generation begins at these positions; who is ahead of this rank is asked for its journal."""
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._generation = generation
        self._positions = positions
        # whoever goes on there or earlier writes that step of its journal anew
        self.damaged = {(rank, step) for rank, step in self.damaged if positions[rank] > step}
        mine = positions[self._rank]
        self._others_behind = min(positions) < mine
        self._fetchers = {
            rank: Fetcher(
                rank,
                addresses[rank],
                self._token,
                self._rank,
                at_home=self._domains[rank] == self._domains[self._rank],
                superseded=self.superseded,
            )
            for rank, position in enumerate(positions)
            if position > mine
        }
        if mine != self._journal.next_step:
            self._recent = mine
        self._journal.start_at(mine)
        self._first, self._began, self._replayed_bytes = mine, time.monotonic(), 0

    def move(self, step: Step) -> None:
        """This rank has taken up another state: what it sent in later steps was sent by the one that it was before."""
        self._recent = step
        self._journal.start_at(step)

    def begin(self, step: Step) -> None:
        """A step begins: what was sent to this rank in it by those ahead is fetched."""
        self._step = step
        self._pending.clear()
        self.sent = {}
        self._unpin()  # an interrupted step's, whose connections are gone
        self._numbers.clear()
        self._ahead = frozenset(rank for rank, position in enumerate(self._positions) if position > step)
        self._journal.begin(step)
        self._recorded = {}
        for rank in self._ahead:
            fetcher = self._fetchers[rank]
            following = Step(step + 1) if self._positions[rank] > step + 1 else None
            try:
                self._recorded[rank] = fetcher.get(step, then=following)
            except Damaged as error:
                self.damaged.add((Rank(rank), step))
                raise PeerLost(f"{error}") from error

    def end(self) -> None:
        """The step's body has run: whatever it has not waited for is waited for now, since its result is kept."""
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._courier.flush()
        self._unpin()

    def _unpin(self) -> None:
        self._journal.unpin(self._pins)
        self._pins.clear()

    def complete(self) -> None:
        """The step is complete."""
        self._journal.complete(self._step)
        self._recent = max(self._recent, Step(self._step - RECENT_STEPS + 2))
        self._journal.drop_channels(self._step - RECENT_STEPS + 1, self._stays_home)
        done = [rank for rank in self._fetchers if self._positions[rank] <= self._step + 1]
        for rank in done:
            fetcher = self._fetchers.pop(rank)
            self._replayed_bytes += fetcher.bytes_in
            fetcher.close()
        if done and not self._fetchers:
            self.on_caught_up(self._first, self._step, self._replayed_bytes, time.monotonic() - self._began)

    @property
    def recent_from(self) -> Step:
        """From which step on messages within the domain are kept, too."""
        return max(self._recent, Step(self._journal.kept_from))

    @property
    def replaying(self) -> bool:
        """Whether somebody is ahead in the step in progress, or the one that was begun last."""
        return bool(self._ahead)

    @property
    def waited_s(self) -> float:
        """How long this rank has waited in all: for messages, and for collectives over several stages."""
        return self._courier.waited_s + self._waited_s

    def _waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def _stays_home(self, channel: Channel) -> bool:
        if channel.peer == ALL:
            return all(self._domains[rank] == self._domains[self._rank] for rank in self._members[channel.group])
        return self._domains[channel.peer] == self._domains[self._rank]

    def close(self) -> None:
        """Drop all connections."""
        for fetcher in self._fetchers.values():
            fetcher.close()

    @property
    def generation(self) -> int:
        """The generation in which this rank goes on."""
        return self._generation

    # looking ahead ---------------------------------------------------------------------------------------------------

    @property
    def step(self) -> Step:
        """The step in progress, or the one that was begun last."""
        return self._step

    def channel(self, group: dist.ProcessGroup, tag: int) -> Channel:
        """Return the channel over which this rank gets messages in a group."""
        return Channel(group.group_name, "send", self._rank, tag)

    def peek(self, peer: int, channel: Channel, at: int) -> Record | None:
        """Return a message that this step will be given, out of the journal of a rank ahead; it stays there."""
        records = self._recorded[peer].get(channel) if peer in self._recorded else None
        return records[at] if records is not None and at < len(records) else None

    # operations ------------------------------------------------------------------------------------------------------

    def take(self, group: HealingGroup, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work | None:
        """Answer an operation, or return ``None``: then it is to be issued, and its handle given to ``issued``."""
        match name:
            case "send":
                return self._send(group, *_arguments(("tensors", "dst", "tag"), args, kwargs))
            case "recv":
                return self._receive(group, *_arguments(("tensors", "src", "tag"), args, kwargs))
            case "recv_anysource":
                raise ValueError(
                    "a receive from any rank cannot be replayed: with protect(stage=...), name the sender of every "
                    "receive within a step"
                )
        if not self._spans_stages(group):
            return None
        if name not in ALIKE:
            raise ValueError(
                f"{name} over ranks of several stages cannot be replayed: within a step, use send/recv, all_reduce, "
                "broadcast, all_gather or barrier between stages"
            )
        ahead = [rank for rank in self._ranks(group) if rank in self._ahead]
        if not ahead:
            return None
        channel = self._numbered(group, name)
        outputs = outputs_of(name, args, kwargs)
        for tensor in outputs:
            self._next(ahead[0], channel).copy_to(tensor)
            self._journal.append(self._generation, self._step, channel, tensor)
        return ReplayedWork(outputs)

    def issued(self, group: HealingGroup, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], work: Any) -> Any:
        """An operation is under way: keep what it gives, where another rank may have to be told later."""
        if name not in ALIKE or not isinstance(work, dist.Work) or not self._spans_stages(group):
            return work
        channel = self._numbered(group, name)
        outputs = outputs_of(name, args, kwargs)
        generation, step = self._generation, self._step

        def keep(_: int, failure: str | None) -> None:
            if failure is None:
                for tensor in outputs:
                    self._journal.append(generation, step, channel, tensor)

        recorded = _Timed(work, keep, self._waited)
        self._pending.append(recorded)
        return recorded

    def _numbered(self, group: HealingGroup, name: str) -> Channel:
        """Return a channel for one collective alone: several may be under way, and be done in any order."""
        key = (group.group_name, name)
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        return Channel(*key, ALL, number)

    def _send(self, group: HealingGroup, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work | None:
        peer = self._ranks(group)[dst]
        channel = Channel(group.group_name, "send", peer, tag)
        live = peer not in self._ahead
        by_courier = live and _on_host(tensors)
        for tensor in tensors:  # before it counts as sent: whoever has received it must find it here
            pin = self._journal.append(self._generation, self._step, channel, tensor, pin=by_courier)
            if pin is not None:  # what the kernel does not take at once is sent from the journal's own copy
                self._pins.append(pin)
            self.sent[peer] = self.sent.get(peer, 0) + tensor.nbytes
            if by_courier:
                payload = memory_of(tensor.contiguous() if pin is None else pin.tensor)
                self._courier.send(peer, _name(channel), payload, stays=pin is not None)
        return ReplayedWork(tensors) if by_courier or not live else None

    def _receive(self, group: HealingGroup, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work | None:
        peer = self._ranks(group)[src]
        channel = Channel(group.group_name, "send", self._rank, tag)
        if peer not in self._ahead:
            if not _on_host(tensors):
                return None
            (tensor,) = tensors
            # not only if the sender is behind: it may itself wait for one that is
            timeout = CATCHES_UP_WITHIN if self._others_behind else group.timeout
            return self._courier.receive(peer, _name(channel), tensor, timeout)
        for tensor in tensors:
            self._next(peer, channel).copy_to(tensor)
        return ReplayedWork(tensors, src)

    def _next(self, peer: int, channel: Channel) -> Record:
        records = self._recorded[peer].get(channel)
        if not records and self._recorded[peer].partial:
            self.damaged.add((Rank(peer), self._step))
            raise PeerLost(f"rank {peer} was interrupted before it had sent all of step {self._step}")
        if not records:
            raise ValueError(
                f"rank {peer} sent nothing more to rank {self._rank} in step {self._step} over {channel.group!r} (tag "
                f"{channel.tag}): the script does not do the same as the first time. Is the pipeline's schedule "
                "protected? protect(schedule=schedule)"
            )
        return records.popleft()

    # who is who ------------------------------------------------------------------------------------------------------

    def _ranks(self, group: HealingGroup) -> tuple[int, ...]:
        name = group.group_name
        if name not in self._members:
            self._members[name] = tuple(dist.get_process_group_ranks(group))
        return self._members[name]

    def _spans_stages(self, group: HealingGroup) -> bool:
        return len({self._stages[rank] for rank in self._ranks(group)}) > 1


class _Timed(RecordedWork):
    """Tells how long it was waited for."""

    def __init__(
        self, live: dist.Work, capture: Callable[[int, str | None], None], waited: Callable[[float], None]
    ) -> None:
        super().__init__(live, capture)
        self._waited = waited

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the live operation, then take down what it gave."""
        began_s = time.monotonic()
        try:
            return super().wait(timeout)
        finally:
            self._waited(time.monotonic() - began_s)


def _on_host(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _name(channel: Channel) -> str:
    return f"{channel.group}/{channel.tag}"


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return an operation's arguments in order, however they were given."""
    return [args[number] if number < len(args) else kwargs[name] for number, name in enumerate(names)]
