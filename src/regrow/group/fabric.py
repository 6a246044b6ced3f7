"""All healing groups of one process: connected, aborted and reconnected together, generation by generation.

Two threads meet here. The main thread runs operations, creates groups and reconnects; a watcher may abort at any
moment. Neither ever holds the lock while it waits, and gloo's constructors and destructors, which can block, run in
helper threads.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from regrow.errors import PeerLost, SetupDiverged
from regrow.group import backend, helpers, sockets
from regrow.group.activity import Activity
from regrow.group.healing import HealingGroup
from regrow.group.joining import detached, drop, join
from regrow.group.network import Inner, Network
from regrow.group.record import RECORD_LIMIT, Answerer, Recorder, Replayer, outputs_of


class Mode(enum.Enum):
    """What an operation is answered from."""

    LIVE = "live"
    RECORDING = "recording"  # the first set-up: live, and results are recorded
    REPLAYING = "replaying"  # a replacement's set-up: no peers, answers come from the record


class Transport(Protocol):
    """Stands between the script and the groups while it is engaged."""

    def take(self, group: HealingGroup, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation, or return ``None``: then it is issued."""

    def issued(self, group: HealingGroup, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], work: Any) -> Any:
        """An operation was issued: return the handle that its caller gets."""


class Fabric:
    """All healing groups of this process. One per process, made by ``regrow.init()``.

    Only the main thread writes ``generation``, the mode and the groups; ``abort`` may come from any thread.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        generation: int,
        store: Store,
        host_addr: str = "127.0.0.1",
        timeout: timedelta,
        mode: Mode,
        record: bytes | None = None,
        connect_timeout_s: float = 30.0,
        user_timeout_s: float = 10.0,
        record_limit: int = RECORD_LIMIT,
    ) -> None:
        if mode is Mode.REPLAYING and record is None:
            raise ValueError("a replacement's set-up needs the record of the first one: pass record=")
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.timeout = timeout
        self.mode = mode
        self.plain = mode is Mode.LIVE
        """True when operations go straight to gloo: live, not aborted, nothing recorded or replayed."""
        self.before_collective: Callable[[str], None] | None = None
        self.ops_issued = 0
        self.activity: Activity | None = None
        """Who is told of collectives on the short way, if anyone wants to know when the network is idle."""
        self.last_work: Any = None
        self._store = store
        self._host_addr = host_addr
        self._connect_timeout_s = connect_timeout_s
        self._user_timeout_s = user_timeout_s
        self._groups: list[HealingGroup] = []
        self._named: dict[str, int] = {}
        self._lock = threading.Lock()
        self._aborted: str | None = None
        self._local = threading.local()
        self._tapped = 0
        self._transport: Transport | None = None
        self._setup: Recorder | Replayer | None = None
        if mode is Mode.RECORDING:
            self._setup = Recorder(record_limit)
        elif mode is Mode.REPLAYING:
            self._setup = Replayer(record)
        self._networks: tuple[Network, ...] = ()
        self._network = self._new_network(generation)
        _watch_process(self)

    # -- groups

    def install(self) -> None:
        """Register backend ``regrow`` with this fabric as its owner. Idempotent."""
        backend.install(self)

    @property
    def groups(self) -> list[HealingGroup]:
        """The groups, in the order in which they were created."""
        return list(self._groups)

    @property
    def world(self) -> HealingGroup:
        """The group of all ranks."""
        if not self._groups:
            raise ValueError("there is no process group yet: call dist.init_process_group('regrow', ...)")
        return self._groups[0]

    def create(
        self, *, name: str, rank: int, size: int, store: Store | None, timeout: timedelta | None
    ) -> HealingGroup:
        """Make a group, and connect it unless this is a replacement's set-up. Called by torch through the backend."""
        limit = timeout if timeout is not None else self.timeout
        before = self._named.get(name, 0)
        self._named[name] = before + 1
        meeting = f"{name}~{before}" if before else name  # torch counts anew once it has destroyed its world
        group = HealingGroup(self, name=name, meeting=meeting, rank=rank, size=size, store=store, timeout=limit)
        if self.mode is not Mode.REPLAYING:
            self._require_unaborted()
            deadline = time.monotonic() + self._connect_timeout_s
            try:
                (connected,) = join(self._network, [group], superseded=lambda: False, deadline=deadline)
            except (PeerLost, TimeoutError):
                self.abort(f"group {name!r} could not be connected")
                raise
            group.attach(connected, self._network)
        self._groups.append(group)
        return group

    def retire(self, group: HealingGroup) -> None:
        """Shut one group down for good. The connections end when gloo has let go of them, in a helper thread."""
        if group in self._groups:
            self._groups.remove(group)
        self.last_work = None
        self._network.forget(group.meeting)
        drop(detached([group]))

    def end_group(self, group: HealingGroup) -> None:
        """Wake whoever is blocked in one group. The fabric is not intact afterwards."""
        if group.inner is not None:
            self._network.end_group(group.meeting)

    # -- generations

    def abort(self, why: str, *, below: int | None = None) -> None:
        """End this generation: operations raise ``PeerLost``, blocked ones wake, a reconnection in progress stops.

        From any thread, idempotent, quick. ``below`` makes it conditional: nothing happens if the current generation is
        not below it, so that news of a failure cannot end the generation that already heals it.
        """
        with self._lock:
            if below is not None and self.generation >= below:
                return
            if self._aborted is None:
                self._aborted = why
            self.plain = False
            network = self._network
        network.end()

    def reconnect(self, generation: int, *, superseded: Callable[[], bool], deadline: float) -> None:
        """Connect every group, in the order of creation, at a new generation. Each generation is tried once.

        Raises ``Superseded`` as soon as ``superseded()`` says so (asked every 2 ms), ``PeerLost`` when a peer is lost
        or ``abort`` comes, ``TimeoutError`` at the deadline (``time.monotonic()``); the groups then stay aborted.
        """
        if self.mode is Mode.REPLAYING:
            raise ValueError("a replacement's set-up is not over: call go_live() before reconnect()")
        with self._lock:
            old = self._network
            self.generation = generation
            self._aborted = f"generation {generation} is not connected yet"
            self.plain = False
            network = self._network = self._new_network(generation)
        self.last_work = None
        old.end()
        self._close(old)
        connected = join(network, self._groups, superseded=superseded, deadline=deadline)
        with self._lock:
            if network.ended.is_set():
                drop(connected)
                raise PeerLost(f"aborted: {self._aborted}", generation=generation)
            for group, inner in zip(self._groups, connected, strict=True):
                group.attach(inner, network)
            self._aborted = None
            self._settle()

    def unsent(self) -> int:
        """Return how many bytes of collectives that are over here are still on their way to others."""
        return self._network.unsent()

    def intact(self) -> bool:
        """Whether no connection of any group has been lost and nothing was aborted. Cheap."""
        return self._aborted is None and self._network.intact()

    def _new_network(self, generation: int) -> Network:
        network = Network(
            generation=generation,
            store=self._store,
            host_addr=self._host_addr,
            user_timeout_s=self._user_timeout_s,
        )
        self._networks = (*self._networks[-8:], network)
        return network

    def _close(self, network: Network) -> None:
        """Let go of a network that has ended, and of every group on it."""
        drop(detached(self._groups), network)

    def _require_unaborted(self) -> None:
        if self._aborted is not None:
            raise PeerLost(f"aborted: {self._aborted}", generation=self.generation)

    # -- operations that are not plain

    def issue(self, group: HealingGroup, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, record or replay one operation."""
        taps = getattr(self._local, "taps", None)
        tap = taps[-1] if taps else self._setup
        if isinstance(tap, (Replayer, Answerer)):  # asks no peer, so it does not matter whether one is lost
            return tap.answer(group.group_name, name, outputs_of(name, args, kwargs))
        self._require_unaborted()
        inner = group.inner
        if inner is None:
            raise PeerLost(f"group {group.group_name!r} is not connected", generation=self.generation)
        if self.before_collective is not None:
            self.before_collective(name)
        self.ops_issued += 1
        call = getattr(inner, name)
        if tap is None:
            transport = self._transport
            answer = transport.take(group, name, args, kwargs) if transport is not None else None
            if answer is not None:
                return answer
            self.last_work = work = call(*args, **kwargs)
            handle = group.handle(name, work)
            return handle if transport is None else transport.issued(group, name, args, kwargs, handle)
        outputs = outputs_of(name, args, kwargs)
        try:
            self.last_work = live = call(*args, **kwargs)
        except (RuntimeError, ValueError) as refusal:
            tap.refuse(group.group_name, name, outputs, refusal)
            raise
        return tap.take(group.group_name, name, outputs, group.handle(name, live))

    @property
    def waiting(self) -> bool:
        """Whether the operation that was issued last is outstanding right now. Best effort, cheap."""
        work = self.last_work
        if work is None:
            return False
        if work.is_completed():
            self.last_work = None  # it holds the operation's tensors
            return False
        return True

    # -- records

    def seal(self) -> bytes:
        """End the first set-up: return its record and go live."""
        if self.mode is not Mode.RECORDING or not isinstance(self._setup, Recorder):
            raise ValueError(f"there is nothing to seal in mode {self.mode.name}")
        record = self._setup.bytes()
        with self._lock:
            self.mode, self._setup = Mode.LIVE, None
            self._settle()
        return record

    def go_live(self) -> None:
        """End a replacement's set-up. Operations need ``reconnect`` from here on."""
        if self.mode is not Mode.REPLAYING or not isinstance(self._setup, Replayer):
            raise ValueError(f"there is no replay to end in mode {self.mode.name}")
        left = self._setup.left()
        if left:
            raise SetupDiverged(f"the first set-up had more operations: {left} (by group) were not asked for")
        with self._lock:
            self.mode, self._setup = Mode.LIVE, None
            self._aborted = f"generation {self.generation} is not connected yet"
            self._settle()

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record this thread's operations: ``with fabric.recording() as rec: ...`` and then ``rec.bytes()``."""
        recorder = Recorder()
        with self._tap(recorder):
            yield recorder

    @contextlib.contextmanager
    def replaying(self, record: bytes) -> Iterator[Replayer]:
        """Answer this thread's operations from a record."""
        replayer = Replayer(record)
        with self._tap(replayer):
            yield replayer

    @contextlib.contextmanager
    def answering(self, answer: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
        """Let ``answer(op, outputs)`` fill the outputs of this thread's operations, instead of asking any peer."""
        with self._tap(Answerer(answer)):
            yield

    @contextlib.contextmanager
    def _tap(self, tap: Recorder | Replayer | Answerer) -> Iterator[None]:
        taps = self._local.__dict__.setdefault("taps", [])
        with self._lock:
            self._tapped += 1
            self.plain = False
        taps.append(tap)
        try:
            yield
        finally:
            taps.pop()
            with self._lock:
                self._tapped -= 1
                self._settle()

    def engage(self, transport: Transport | None) -> None:
        """Let operations, other than a set-up's, go through a transport; ``None``: straight to the groups again."""
        with self._lock:
            self._transport = transport
            self._settle()

    def _settle(self) -> None:
        """Work out anew whether operations may take the short way. Called with the lock held."""
        untouched = self._tapped == 0 and self._transport is None
        self.plain = self.mode is Mode.LIVE and self._aborted is None and untouched

    # -- the end

    def close(self) -> None:
        """Let go of all connections and of the backend. The groups raise ``PeerLost`` afterwards."""
        self.abort("the fabric was closed")
        backend.uninstall(self)
        self.last_work = None
        self._close(self._network)
        self._groups = []

    def after_fork_in_child(self) -> None:
        """Let go of the inherited connections without ending them; nothing here works in the child."""
        self._lock = threading.Lock()  # another thread may have held it
        self._aborted = f"process {os.getpid()} was forked from a worker and has no connections"
        self.plain = False
        for network in self._networks:
            sockets.blank(network.names)
        _left_behind.extend(group.detach() for group in self._groups)  # their threads are not here: never destroy them

    def before_exit(self) -> None:
        """Call off what still connects at an ended generation, and hold no tensor of an operation."""
        for network in self._networks:
            if network is not self._network or self._aborted is not None:
                network.ended.set()
        self.last_work = None


_left_behind: list[Inner | None] = []
_fabrics: list[weakref.ref[Fabric]] = []
_owners: set[int] = set()
"""The processes that made a fabric of their own: one, and perhaps the one that it was forked from."""


def _watch_process(fabric: Fabric) -> None:
    if not _fabrics:
        os.register_at_fork(after_in_child=lambda: _for_each(Fabric.after_fork_in_child))
        helpers.on_exit(_before_exit)
    _owners.add(os.getpid())
    _fabrics.append(weakref.ref(fabric))


def _before_exit() -> None:
    """Let go of the groups while there is an interpreter.

    A thread of gloo that lets go of a tensor later asks for the interpreter's lock, and ends the process instead with
    SIGABRT: a run that has done all its work would be taken for a failure. Done in another thread, since gloo first
    finishes what was issued. Not in a process that was merely forked from a worker: gloo's threads are not there.
    """
    if os.getpid() not in _owners:
        return
    _for_each(Fabric.before_exit)
    helpers.start("regrow-destroy", _destroy_groups)


def _destroy_groups() -> None:
    """Destroy all of torch's groups, those of other backends, too."""
    with contextlib.suppress(RuntimeError, ValueError):  # at the end nobody is there to hear of it
        if dist.is_initialized():
            dist.destroy_process_group()


def _for_each(call: Callable[[Fabric], None]) -> None:
    for reference in _fabrics:
        fabric = reference()
        if fabric is not None:
            call(fabric)
