"""One agent per host: joins the run, applies what happens to the shared world, follows it, ends what it started.

Single-threaded on asyncio; nothing in it blocks. Decisions are ``membership.decide``'s, processes are the crew's. A
host is a member in one session after another: when its lease is lost it kills its workers, and comes back as a standby.
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
from regrow.agent.happenings import Event, Lost, NodeJoined, NodeLost, Stopped
from regrow.agent.home import Home
from regrow.agent.join import join, rejoin
from regrow.agent.leader import WORLD_KEY, Leader
from regrow.agent.lookout import Lookout
from regrow.agent.membership import decide
from regrow.agent.options import RunOptions, StartError
from regrow.agent.seats import CannotReturn, Site
from regrow.agent.store import LeaseLost, StoreLost
from regrow.agent.voice import Voice, say
from regrow.agent.world import Phase, World
from regrow.events import EventLog

_FAREWELL_S = 1.0


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
        self._world: World | None = None
        self._departed: set[str] = set()
        self._member = True
        """False while this host's session is over and it has not come back yet."""
        self._site: Site
        self._crew: Crew
        self._voice: Voice
        self._log: EventLog | None = None

    async def run(self) -> int:
        """Do the whole run. ``StartError`` if it cannot start."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed_unseen)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        joining = loop.create_task(join(self._options, self._departed.add))
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
        self._voice = Voice(log, self._crew.how)
        nodes = f"{len(site.nprocs)} node{'s' if len(site.nprocs) > 1 else ''}"
        nodes += "" if options.alone else f", this is node {site.node}"
        workers = "1 worker" if site.world_size == 1 else f"{site.world_size} workers"
        say(f"run {site.run_id}: {workers} on {nodes}, logs in {options.log_dir}")
        log.append(
            "run_started",
            world_size=site.world_size,
            nprocs=site.nprocs,
            spares=options.spares,
            command=options.command,
            policy=options.policy.value,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            starting = asyncio.create_task(self._crew.start())
            if await self._unless_ended(starting):
                starting.result()
                for work in (self._sessions(), self._crew.watch.run()):
                    tasks.append(asyncio.create_task(self._guarded(work)))
            return await self._end
        finally:
            if self._member and not (self._world is not None and self._world.over):
                await self._call_off("its agent cannot go on")
            await self._crew.end(self._hurry)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()
            log.close()

    async def _leave(self) -> None:
        """Let go of the store; node 0 stays until the others have learnt how it ended."""
        await self._site.tenure.close()
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

    # ------------------------------------------------------------------ sessions

    async def _sessions(self) -> None:
        """Be a member for as long as it goes, and again. ``StoreLost`` if there is nothing to come back to."""
        while True:
            why = await self._session()
            self._member = False
            assert self._log is not None
            self._log.append("fenced", why=why, session=self._site.session)
            if not self._end.done():
                say(f"node {self._site.node}: {why}: its workers are killed, others may hold their ranks by now")
            self._site = await self._come_back(why)
            self._reports.clear()
            self._crew.moved(self._site)
            if not self._end.done():
                say(f"node {self._site.node} is back, as a standby")

    async def _session(self) -> str:
        """Take part until the lease or the store is lost; return why. No rank is held any more then."""
        site = self._site
        leader = Leader(
            site.store,
            site.tenure.lease,
            site.node,
            site.session,
            look_every_s=self._options.dead_after_s,
            apply=self._apply,
            report=lambda lost: self._report(lost, None),
            why=self._why_lost,
        )
        lookout = Lookout(
            site.store, site.node, self._options.token, self._options.dead_after_s, self._departed.add
        )  # where no place tells how to be looked at, it looks at nobody

        async def take_part() -> None:
            await self._enter()
            async with asyncio.TaskGroup() as group:
                for work in (self._follow_world(), self._apply_reports(), leader.run(), lookout.run()):
                    group.create_task(work)

        taking_part = asyncio.create_task(take_part())
        either: set[asyncio.Future[Any]] = {taking_part, site.tenure.over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            self._crew.fence()  # before anything else is waited for
        finally:
            taking_part.cancel()
            problems = await asyncio.gather(taking_part, return_exceptions=True)
        return _why_over(site, problems[0])

    async def _enter(self) -> None:
        """Become a member, unless the first world was made with this host in it."""
        site = self._site
        if site.tenure.lease is not None:
            await self._apply(NodeJoined(site.node, site.session, self._options.slots, t=time.time()))
        self._member = True

    async def _come_back(self, why: str) -> Site:
        """Take the place again, as a new session: with growing pauses, up to the time that joining may take."""
        options = self._options
        await self._site.tenure.close()
        deadline, pause_s = time.monotonic() + options.join_timeout_s, options.dead_after_s / 10
        while True:
            try:
                async with asyncio.timeout(options.dead_after_s):
                    return await rejoin(options, self._site)
            except CannotReturn as error:
                raise StoreLost(f"{why} ({error})") from None
            except (OSError, TimeoutError, StoreLost, LeaseLost) as error:
                if time.monotonic() + pause_s > deadline:
                    raise StoreLost(f"{why}, and it could not come back: {error}") from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, options.dead_after_s)

    def _why_lost(self, node: int, session: str) -> str:
        if session in self._departed:
            return "its agent has ended"
        return f"no sign of life for {self._options.dead_after_s:g} s"

    # ------------------------------------------------------------------ the world

    def _report(self, event: Event, record: bytes | None) -> None:
        self._reports.append((event, record))
        self._reported.set()

    async def _apply_reports(self) -> None:
        """Apply what is reported, in order; losses that wait together are applied together."""
        while True:
            await self._reported.wait()
            while self._reports:
                event, record = self._reports.popleft()
                while isinstance(event, Lost) and self._reports and isinstance(self._reports[0][0], Lost):
                    more = self._reports.popleft()[0]
                    assert isinstance(more, Lost)
                    event = event.together(more)
                if record is not None:
                    await self._site.store.put(f"setup/{event.rank}", record)  # type: ignore[union-attr]
                await self._apply(event)
            self._reported.clear()

    async def _apply(self, event: Event) -> World:
        store = self._site.store
        while True:
            entry = await store.get(WORLD_KEY)
            assert entry is not None
            before = World.loads(entry.value)
            world = decide(before, event).world
            if world is before:
                return world
            version = await store.compare_and_set(WORLD_KEY, entry.version, world.dumps())
            if version is not None:
                break
        if world.generation != before.generation and world.phase is Phase.SETUP:
            await store.delete(
                "kv/", prefix=True
            )  # counters of the abandoned set-up would let the new one's barriers pass
        self._voice.record(before, world)
        self._adopt(world, version)
        self._voice.tell(before, world, event)
        return world

    async def _follow_world(self) -> None:
        async for change in self._site.store.watch(WORLD_KEY):
            if change.key == WORLD_KEY and change.value is not None:
                self._adopt(World.loads(change.value), change.version)

    def _adopt(self, world: World, version: int) -> None:
        """Act on a world unless a newer one is known already."""
        if version <= self._version:
            return
        self._version = version
        before, self._world = self._world, world
        self._crew.follow(world)
        self._voice.tell_of_homes(before, world)
        if self._member and not world.over and not world.knows(self._site.node, self._site.session):
            self._site.tenure.end("the others count this host as lost")
        if world.phase is Phase.DONE:
            what = "restarts" if world.restart else "replaced"
            self._finish(0, f"done: {world.reason}, {world.restarts} {what} on the way")
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
        if self._member:
            await self._call_off(f"stopped by {number.name}", exit_code=128 + number)
        self._finish(128 + number, f"stopped by {number.name}")

    async def _call_off(self, why: str, exit_code: int = 1) -> None:
        """End the run for all nodes, if the store can still be reached; a standby is not missed, and only leaves."""
        site = self._site
        with contextlib.suppress(StoreLost, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                entry = await site.store.get(WORLD_KEY)
                event: Event = Lost((), time.time(), (NodeLost(site.node, site.session, why),))
                if site.tenure.lease is None or (entry is not None and site.node in World.loads(entry.value).homes):
                    event = Stopped(site.node, f"node {site.node}: {why}", exit_code, time.time())
                await self._apply(event)


def _why_over(site: Site, problem: BaseException | None) -> str:
    """Say why a session is over, or raise what is no reason for that but a bug."""
    if isinstance(problem, BaseExceptionGroup):
        unknown = problem.split((StoreLost, LeaseLost))[1]
        problem = problem.exceptions[0] if unknown is None else unknown.exceptions[0]
    if isinstance(problem, (StoreLost, LeaseLost)):
        return str(problem)
    if site.tenure.over.done():
        return site.tenure.over.result()
    if isinstance(problem, Exception):
        raise problem
    return "it was cancelled"


def run(options: RunOptions) -> int:
    """Run the job to its end; return its exit code."""

    async def main() -> int:
        return await Agent(options).run()

    try:
        return asyncio.run(main())
    except StartError as error:
        print(f"regrow run: error: {error}", file=sys.stderr)
        return 1
