"""One agent per host: joins the run, applies what happens to the shared world, follows it, ends what it started.

Single-threaded on asyncio; nothing in it blocks. Decisions are ``membership.decide``'s, processes are the crew's.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from regrow.agent.crew import Crew
from regrow.agent.home import Home
from regrow.agent.join import WORLD_KEY, Site, join
from regrow.agent.membership import Event, Lost, Stopped, Suspect, decide
from regrow.agent.options import RunOptions, StartError
from regrow.agent.store import StoreLost
from regrow.agent.world import Phase, World
from regrow.events import EventLog

_FAREWELL_S = 1.0


def say(message: str) -> None:
    """Tell the person who watches, in one line."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    with contextlib.suppress(OSError, ValueError):
        print(f"[regrow] {clock}.{int(now % 1 * 1000):03d} {message}", file=sys.stderr, flush=True)


class Agent:
    """``await Agent(options).run()`` returns the job's exit code."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._reports: collections.deque[tuple[Event, bytes | None]] = collections.deque()
        self._reported = asyncio.Event()
        self._hurry = asyncio.Event()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._signal: signal.Signals | None = None
        self._version = 0
        self._over = False
        self._site: Site
        self._crew: Crew
        self._log: EventLog | None = None

    async def run(self) -> int:
        """Do the whole run. ``StartError`` if it cannot start."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed_unseen)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        joining = loop.create_task(join(self._options, self._node_gone))
        if not await self._unless_ended(joining):
            return self._end.result()
        self._site = joining.result()
        home = Home(self._site.run_id, self._site.node)
        try:
            return await self._run_joined(home)
        finally:
            home.close()

    async def _unless_ended(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a part of the start; False, and no more of it, if the run ends meanwhile."""
        either: set[asyncio.Future[Any]] = {task, self._end}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._end.done():
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _run_joined(self, home: Home) -> int:
        options, site = self._options, self._site
        log = self._log = EventLog(options.log_dir, site.node, site.run_id)
        self._crew = Crew(options, site, home.path, log, say, self._report)
        nodes = "1 node" if options.nnodes == 1 else f"{options.nnodes} nodes, this is node {site.node}"
        workers = "1 worker" if site.world_size == 1 else f"{site.world_size} workers"
        say(f"run {site.run_id}: {workers} on {nodes}, logs in {options.log_dir}")
        log.append(
            "run_started",
            world_size=site.world_size,
            nprocs=site.nprocs,
            spares=options.spares,
            command=options.command,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            starting = asyncio.create_task(self._crew.start())
            if await self._unless_ended(starting):
                starting.result()
                for work in (self._follow_world(), self._apply_reports(), self._crew.watch.run()):
                    tasks.append(asyncio.create_task(self._guarded(work)))
            return await self._end
        finally:
            if not self._over:
                await self._call_off("its agent cannot go on")
            await self._crew.end(self._hurry)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()
            log.close()

    async def _leave(self) -> None:
        """Let go of the store; node 0 stays until the others have learnt how it ended."""
        if self._site.leave is not None:
            await self._site.leave()
        elif self._site.server is not None:
            await self._site.server.drain(0.0 if self._hurry.is_set() else self._options.grace_s + 5.0)
            await self._site.server.close()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A part that fails ends the run instead of leaving it to hang."""
        try:
            await work
        except StoreLost as error:
            sentence = f"{error}, so this node ends its workers"
            self._note_failure(sentence)
            self._finish(1, f"failed: {sentence}")
        except Exception as error:  # noqa: BLE001  whatever it is, run() raises it after the workers were ended
            self._crash(error)

    def _failed_unseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback or task failed with nobody waiting for it. A broken connection is no reason to end; a bug is."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._crash(error)

    def _crash(self, error: Exception) -> None:
        if not self._end.done():
            self._note_failure(str(error) or repr(error))
            self._end.set_exception(error)

    def _note_failure(self, reason: str) -> None:
        if self._log is not None and not self._end.done():
            self._log.append("failed", reason=reason)

    def _finish(self, exit_code: int, sentence: str) -> None:
        if not self._end.done():
            say(sentence)
            self._end.set_result(exit_code)

    # ------------------------------------------------------------------ the world

    def _report(self, event: Event, record: bytes | None) -> None:
        self._reports.append((event, record))
        self._reported.set()

    async def _apply_reports(self) -> None:
        """Apply what the crew reports, in order; losses that wait together are applied together."""
        while True:
            await self._reported.wait()
            while self._reports:
                event, record = self._reports.popleft()
                while isinstance(event, Lost) and self._reports and isinstance(self._reports[0][0], Lost):
                    more = self._reports.popleft()[0]
                    assert isinstance(more, Lost)
                    event = Lost((*event.workers, *more.workers), more.t)
                if record is not None:
                    await self._site.store.put(f"setup/{event.rank}", record)  # type: ignore[union-attr]
                await self._apply(event)
            self._reported.clear()

    async def _apply(self, event: Event) -> None:
        store = self._site.store
        while True:
            entry = await store.get(WORLD_KEY)
            assert entry is not None
            before = World.loads(entry.value)
            decision = decide(before, event)
            if decision.world is before:
                return
            version = await store.compare_and_set(WORLD_KEY, entry.version, decision.world.dumps())
            if version is not None:
                break
        if decision.world.generation != before.generation and decision.world.phase is Phase.SETUP:
            await store.delete(
                "kv/", prefix=True
            )  # counters of the abandoned set-up would let the new one's barriers pass
        self._record(before, decision.world)
        self._adopt(decision.world, version)
        self._tell(before, decision.world, event)

    def _record(self, before: World, world: World) -> None:
        """Write the transition down; only the agent that made it does, so it stands there once."""
        assert self._log is not None
        if world.generation != before.generation:
            lost = [{"rank": loss.rank, "why": loss.why, "t": loss.t} for loss in world.lost]
            self._log.append("generation", generation=world.generation, lost=lost, reason=world.reason)
        if world.phase is not before.phase:
            name = {Phase.TRAINING: "training", Phase.DONE: "done", Phase.FAILED: "failed", Phase.SETUP: "setup"}
            self._log.append(name[world.phase], generation=world.generation, reason=world.reason)

    def _tell(self, before: World, world: World, event: Event) -> None:
        if world.over:
            return  # told by every agent, when it ends
        if isinstance(event, Lost):
            for worker in event.workers:
                at = "" if worker.step is None else f" at step {worker.step}"
                how = "all start again" if world.phase is Phase.SETUP else self._crew.how.get(worker.rank, "replaced")
                say(f"rank {worker.rank} died ({worker.why}){at}: generation {world.generation}, {how}")
            if before.phase is Phase.TRAINING and world.phase is Phase.SETUP:
                say(world.reason)
        elif isinstance(event, Suspect):
            say(f"{world.reason} (generation {world.generation})")
        elif before.phase is Phase.SETUP and world.phase is Phase.TRAINING:
            say(world.reason)
        elif len(before.holders) < len(world.holders) == world.world_size:
            say(f"generation {world.generation}: all {world.world_size} ranks train again")

    async def _follow_world(self) -> None:
        async for change in self._site.store.watch(WORLD_KEY):
            if change.key == WORLD_KEY and change.value is not None:
                self._adopt(World.loads(change.value), change.version)

    def _adopt(self, world: World, version: int) -> None:
        """Act on a world unless a newer one is known already."""
        if version <= self._version:
            return
        self._version = version
        self._over = world.over
        self._crew.follow(world)
        if world.phase is Phase.DONE:
            self._finish(0, f"done: {world.reason}, {world.restarts} replaced on the way")
        elif world.phase is Phase.FAILED:
            if world.evidence and not self._end.done():
                sys.stderr.write(world.evidence.rstrip("\n") + "\n")
            self._finish(1 if world.exit_code is None else world.exit_code, f"failed: {world.reason}")

    # ------------------------------------------------------------------ the ends

    def _signalled(self, number: int) -> None:
        if self._signal is not None:
            self._hurry.set()
            return
        self._signal = signal.Signals(number)
        if self._log is None:
            self._finish(128 + number, f"stopped by {self._signal.name} while joining the other nodes")
            return
        self._log.append("signal", signal=self._signal.name)
        say(f"{self._signal.name}: workers are asked to end (a second signal kills them)")
        self._stopping = asyncio.create_task(self._stop(self._signal))

    async def _stop(self, number: signal.Signals) -> None:
        await self._call_off(f"stopped by {number.name}", exit_code=128 + number)
        self._finish(128 + number, f"stopped by {number.name}")

    async def _call_off(self, why: str, exit_code: int = 1) -> None:
        """End the run for all nodes, if the store can still be reached."""
        node = self._site.node
        with contextlib.suppress(StoreLost, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._apply(Stopped(node, f"node {node}: {why}", exit_code, time.time()))

    def _node_gone(self, node: int) -> None:
        if self._log is not None and not self._end.done():
            self._report(Stopped(node, f"the agent of node {node} is gone", 1, time.time()), None)


def run(options: RunOptions) -> int:
    """Run the job to its end; return its exit code."""

    async def main() -> int:
        return await Agent(options).run()

    try:
        return asyncio.run(main())
    except StartError as error:
        print(f"regrow run: error: {error}", file=sys.stderr)
        return 1
