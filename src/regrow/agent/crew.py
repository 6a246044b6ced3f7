"""The workers of one host: started, listened to, judged, replaced as the world demands, and ended.

The crew turns what it sees into membership events and acts on the worlds it is given.
It decides nothing about membership.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow.agent import kv
from regrow.agent.forking import Nursery
from regrow.agent.happenings import Event, Lost, Suspect
from regrow.agent.health import Limits
from regrow.agent.hearing import ending, hear
from regrow.agent.link import Link, LinkServer, group_of
from regrow.agent.logs import Logs
from regrow.agent.options import RunOptions, StartError
from regrow.agent.process import KILLED_S, Process, end_all, executed
from regrow.agent.seats import Site
from regrow.agent.spares import SparePool
from regrow.agent.tasks import Tasks
from regrow.agent.told import assign_frame, world_frame
from regrow.agent.watch import Watch
from regrow.agent.worker import Environment, Worker
from regrow.agent.world import Phase, World
from regrow.events import EventLog
from regrow.fence import Fence
from regrow.lifeline import dying_by
from regrow.peer.keeper import Keeper
from regrow.slots import Slots
from regrow.wire import Frame

_REFILL_AFTER_S = 5.0
_REFILL_WHOLE_S = 2.0  # the first steps at full strength are part of the recovery: leave them the CPU
_LAST_WORDS_S = 0.5
_LAST_WORDS_OF_THE_KILLED_S = 0.05
_LAST_WORDS_OF_THE_DOOMED_S = 0.002  # its socket closes much later; what it said before is there already
_SUSPECT_HOLD_S = 0.2
_AFTER_RAISING_S = 10.0

Report = Callable[[Event, bytes | None], None]


class Crew:
    """One host's workers and spares. ``report`` takes events in order, with a set-up record where there is one."""

    def __init__(
        self,
        options: RunOptions,
        site: Site,
        shared_dir: Path,
        log: EventLog,
        say: Callable[[str], None],
        report: Report,
    ) -> None:
        self._options = options
        self._site = site
        self._log = log
        self._say = say
        self._report = report
        self._logs = Logs(options, site.run_id)
        self._fence = Fence.create(shared_dir)
        site.tenure.tell(self._fence.move)
        self._server = LinkServer(shared_dir / "agent.sock", options.token, self, say)
        self._keeper: Keeper | None = None
        if not options.alone:  # on one host there is nobody whose snapshots could be kept
            self._keeper = Keeper(shared_dir / "kept", site.host_addr, options.token, say)
        self._env = Environment(options, site, self._server.path, shared_dir, self._keeper)
        self._nursery: Nursery | None = None
        if options.forked:
            self._nursery = Nursery(options.command, self._env.complete(self._env.of_spare(0)), log.append)
        self._spares = SparePool(options.spares, self._start_spare, self._may_refill, say)
        self._workers: dict[int, Worker] = {}
        self._by_link: dict[Link, Worker] = {}
        self._alive: set[Worker] = set()
        self._tasks = Tasks()
        self._world: World | None = None
        self._fenced = False
        self._ending = False
        self._setup_t = time.monotonic()
        limits = Limits(dead_after_s=options.dead_after_s, stuck_after_s=options.stuck_after_s)
        self.watch = Watch(limits, self._accountable, self._complete, self._kill)
        self.how: dict[int, str] = {}
        self._param_bytes = 0

    async def start(self) -> None:
        """Listen for workers, and make ready to start them; the first world does."""
        await self._server.start()
        if self._nursery is not None:
            await self._nursery.start()

    # ------------------------------------------------------------------ what the world demands

    def follow(self, world: World) -> None:
        """Hold exactly the ranks whose home is this host, tell them of the new world, replace those that it lost."""
        previous, self._world = self._world, world
        now = time.monotonic()
        mine = self._mine(world)
        for rank in self._workers.keys() - mine:
            self._let_go(rank)
        reconnecting = previous is None or previous.generation != world.generation
        if reconnecting:
            for worker in self._workers.values():
                worker.attempt_t = worker.progress_t = now
                worker.fetching_s = 0.0
                worker.finished = False
        if previous is not None and previous.phase is Phase.SETUP and world.phase is Phase.TRAINING:
            self.watch.set_up_in(now - self._setup_t)
        elif previous is None:
            self.watch.set_up_in(world.setup_s)
        for worker in self._workers.values():
            self._tell(worker)
        if world.over or self._ending:
            return
        for rank in sorted(mine):
            held = self._workers.get(rank)
            if held is None or held.incarnation < world.incarnation[rank]:
                self.how[rank] = self._fill(rank, world)
        if not mine:
            self._spares.refill_in(0.0)  # nobody here needs the CPU more
            return
        if world.phase is Phase.SETUP:
            if reconnecting or (previous is not None and previous.homeless and not world.homeless):
                self._setup_t = now
            return
        if len(world.holders) == world.world_size:
            self._spares.refill_in(_REFILL_WHOLE_S if world.generation else 0.0)
        elif reconnecting:
            self._refill_later()

    def _mine(self, world: World) -> set[int]:
        """The ranks that this host holds, as the session that it is now."""
        if self._fenced or not world.knows(self._site.node, self._site.session):
            return set()
        return set(world.ranks_of(self._site.node))

    def _let_go(self, rank: int) -> None:
        """Others hold this rank now, or may: what it left here is of no use to anybody."""
        worker = self._workers.pop(rank)
        worker.process.kill()
        Slots(self._env.small_state_path(rank)).remove()
        self._log.append("let_go", rank=rank, pid=worker.process.pid, incarnation=worker.incarnation)

    def fence(self) -> None:
        """Kill whoever holds a rank here; none is held before ``moved``."""
        self._fenced = True
        for rank in list(self._workers):
            self._let_go(rank)

    def moved(self, site: Site) -> None:
        """This host is a member again, in another session."""
        self._site = site
        self._fenced = False
        site.tenure.tell(self._fence.move)

    def _tell(self, worker: Worker) -> None:
        world = self._world
        if world is None or worker.link is None or not worker.assigned:
            return
        worker.link.send(world_frame(world, self.watch.setup_deadline_s))

    def _fill(self, rank: int, world: World) -> str:
        """Give the rank to a new process; return in words which."""
        old = self._workers.pop(rank, None)
        if old is not None:
            old.process.kill()
        replacement = world.phase is Phase.TRAINING
        if not replacement and world.homeless:
            return "it starts when every rank has a host"  # a set-up needs all, and would only time out
        incarnation = world.incarnation[rank]
        if not replacement:
            Slots(self._env.small_state_path(rank)).remove()
        spare = self._spares.take() if replacement else None
        if spare is not None:
            spare.rank, spare.incarnation, spare.replacement = rank, incarnation, True
            spare.local_rank = world.local[rank]
            spare.attempt_t = time.monotonic()
            self._workers[rank] = spare
            self._log.append("spare_assigned", rank=rank, pid=spare.process.pid, incarnation=incarnation)
            if spare.link is None:
                return "a spare that is starting takes over"
            self._tasks.spawn(self._assign(spare))
            return "spare takes over"
        return self._fill_afresh(rank)

    def _fill_afresh(self, rank: int) -> str:
        world = self._world
        assert world is not None
        incarnation = world.incarnation[rank]
        worker = Worker(rank, world.local[rank], incarnation, replacement=world.phase is Phase.TRAINING)
        paths = worker.paths = self._logs.paths(worker.local_rank, incarnation)
        env = self._env.complete(self._env.of_rank(worker, len(self._mine(world))))
        self._start(worker, env, stdout=paths.stdout, stderr=paths.stderr)
        self._workers[rank] = worker
        self._log.append("worker_started", rank=rank, pid=worker.process.pid, incarnation=incarnation)
        return "a new process takes over"

    async def _assign(self, worker: Worker) -> None:
        rank = worker.rank
        assert rank is not None and self._world is not None
        record = await self._site.store.get(f"setup/{rank}") if worker.replacement else None
        if worker.link is None or self._workers.get(rank) is not worker:
            return
        if worker.paths is None:
            worker.paths = self._logs.paths(worker.local_rank, worker.incarnation)
        head = assign_frame(worker, self._site, self._env, self._world)
        limits = {"dead_after_s": self._options.dead_after_s, "setup_deadline_s": self.watch.setup_deadline_s}
        worker.link.send({**head, **limits}, b"" if record is None else record.value)
        worker.assigned = True
        if worker.replacement:
            self._log.append("replacement_ready", rank=rank, pid=worker.pid, generation=self._world.generation)
        worker.heard(time.monotonic())
        self._tell(worker)

    # ------------------------------------------------------------------ spares

    def _start_spare(self) -> Worker:
        worker = Worker(spare=True)
        self._start(worker, self._env.complete(self._env.of_spare(self._param_bytes)), capture_stderr=True)
        return worker

    def _start(self, worker: Worker, env: dict[str, str], **streams: Any) -> None:
        command = self._options.command
        launch = executed(command, env) if self._nursery is None else self._nursery.launch(command, env)
        try:
            worker.process = Process(launch, lambda _: self._exited(worker), **streams)
        except OSError as error:
            raise StartError(f"cannot execute {command[0]}: {error.strerror}") from None
        self._alive.add(worker)

    def _refill_later(self) -> None:
        # while ranks are missing it waits as long as their set-up may take, or it would slow them down
        self._spares.refill_in(max(_REFILL_AFTER_S, self.watch.first_setup_s))

    def _may_refill(self) -> bool:
        world = self._world
        if self._ending or world is None or world.over:
            return False
        return world.phase is Phase.TRAINING or not self._mine(world)

    # ------------------------------------------------------------------ what the workers say

    def on_hello(self, link: Link, head: dict[str, Any]) -> bool:
        """Find the process behind a new link; a forked child of a worker is not taken for the worker itself."""
        group = group_of(link.peer_pid)
        worker = next((one for one in self._alive if one.process.pid == group and one.link is None), None)
        if worker is None or self._ending or (worker.rank is not None and self._workers.get(worker.rank) is not worker):
            return False
        worker.link, worker.pid = link, link.peer_pid
        worker.heard(time.monotonic())
        self._by_link[link] = worker
        worker.watch_lifeline(head.get("lifeline"), self._server.path.parent, self._doomed)
        if worker.rank is None:
            self._spares.arrived(worker)
            self._log.append("spare_ready", pid=worker.pid)
        else:
            self._tasks.spawn(self._assign(worker))
        return True

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Take in one frame. Those of a process that was replaced meanwhile are fenced by its incarnation."""
        worker, head, t = self._by_link[link], frame.head, time.time()
        rank = worker.rank
        if not self._site.tenure.valid:
            return  # others may hold its rank already: nothing that it says counts
        if head["type"] == "heartbeat":
            worker.heartbeat(head, time.monotonic())
            return
        if rank is None:
            return
        match head["type"]:
            case "event":
                fields = {name: value for name, value in head.items() if name not in ("type", "run", "node")}
                self._log.append(**{"event": "unnamed", **fields, "rank": rank})
            case "store":
                self._tasks.spawn(self._serve(link, frame))
            case "kv_purge":
                self._tasks.spawn(kv.purge(self._site.store, str(head["prefix"])))
            case "suspect":
                self._log.append("suspect", rank=rank, generation=head["generation"], why=head.get("why"))
                self._tasks.spawn(self._suspect(worker, int(head["generation"]), str(head.get("why"))))
            case _:
                heard = hear(worker, frame, time.monotonic(), t)
                if head["type"] == "setup_done":
                    self._param_bytes = max(self._param_bytes, int(head.get("param_bytes", 0)))
                if head["type"] in ("setup_done", "finished", "raised"):
                    told = {name: value for name, value in head.items() if name != "type"}
                    self._log.append(head["type"], **{**told, "rank": rank, "incarnation": worker.incarnation})
                if heard is not None:
                    self._report(heard.event, heard.record)
                elif worker.raised is not None:
                    self._must_end(worker, "raised an exception but did not end", _AFTER_RAISING_S)

    def on_malformed(self, link: Link, error: Exception) -> None:
        """What speaks another protocol than ours cannot take part."""
        self._kill(self._by_link[link], f"sent what no worker would send: {error}")

    def on_closed(self, link: Link) -> None:
        """A worker whose link is gone must end soon, or it is ended: nothing can be told to it any more."""
        worker = self._by_link.pop(link)
        self._must_end(worker, "closed its connection to the agent but did not end", self._options.dead_after_s)

    def _must_end(self, worker: Worker, why: str, patience_s: float) -> None:
        def check() -> None:
            if self._world is None or not self._world.all_finished:
                self._kill(worker, why)

        if not worker.process.gone.is_set():
            asyncio.get_running_loop().call_later(patience_s, check)

    async def _serve(self, link: Link, frame: Frame) -> None:
        link.send_bytes(await kv.answer(self._site.store, frame))

    async def _suspect(self, worker: Worker, generation: int, why: str) -> None:
        # mostly somebody did die and his own agent is about to say so: then this one costs no generation of its own
        await asyncio.sleep(_SUSPECT_HOLD_S)
        if worker.rank is not None and self._world is not None and self._world.generation == generation:
            self._report(Suspect(worker.rank, worker.incarnation, generation, why, time.time()), None)

    # ------------------------------------------------------------------ how they end

    def _doomed(self, worker: Worker) -> None:
        """A worker's main thread has ended: if a signal did that, the rank is lost, whatever is still to be freed."""
        t, process = time.time(), worker.process
        if process.gone.is_set() or self._ending or worker.rank is None or self._workers.get(worker.rank) is not worker:
            return
        process.dying_of = dying_by(process.pid)
        if process.dying_of is not None:
            worker.doomed = True
            process.kill()  # what it forked would hold its sockets open
            self._tasks.spawn(self._ended(worker, t))

    def _exited(self, worker: Worker) -> None:
        t = time.time()
        self._alive.discard(worker)
        if worker.lifeline is not None:
            worker.lifeline.stop()
        if self._ending or worker.doomed:
            return
        if worker.rank is None:
            if self._spares.exited(worker):
                self._refill_later()
        elif self._workers.get(worker.rank) is not worker:
            return
        elif worker.spare and worker.link is None and not worker.killed_because:
            # it was given the rank while it started and never got there: nobody built on it, so no generation is lost
            self._spares.failed(worker)
            how = self._fill_afresh(worker.rank)
            self._say(f"rank {worker.rank}: the spare ended ({worker.why}) while it started, {how}")
        else:
            self._tasks.spawn(self._ended(worker, t))

    async def _ended(self, worker: Worker, t: float) -> None:
        """Report the end of a worker, after its last words: they are in the socket already."""
        if worker.doomed:
            await asyncio.sleep(_LAST_WORDS_OF_THE_DOOMED_S)
        elif worker.link is not None:
            code = worker.process.returncode
            patience_s = _LAST_WORDS_S if code is not None and code >= 0 else _LAST_WORDS_OF_THE_KILLED_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.link.closed.wait(), patience_s)
        if worker.rank is not None and worker.set_up and worker.raised is None:
            begun = Slots(self._env.small_state_path(worker.rank)).last_step()
            worker.step = worker.step if begun is None else begun
        end = ending(worker, t)
        if isinstance(end, Lost):
            self._log.append(
                "worker_lost",
                rank=worker.rank,
                why=worker.why,
                pid=worker.process.pid,
                incarnation=worker.incarnation,
                step=end.workers[0].step,
                t_noticed=t,
            )
        self._report(end, None)
        if worker.paths is not None:
            await asyncio.to_thread(self._logs.retire, worker.paths)

    def _kill(self, worker: Worker, why: str) -> None:
        if worker.process.gone.is_set() or worker.killed_because:
            return
        worker.killed_because = why
        worker.process.kill()
        asyncio.get_running_loop().call_later(KILLED_S, worker.process.abandon)

    def _complete(self) -> bool:
        return self._world is None or not self._world.homeless

    def _accountable(self) -> list[Worker]:
        """Who must show signs of life. After the last step nobody: what comes then is the user's own."""
        over = self._world is None or self._world.all_finished or self._ending
        return [] if over else list(self._workers.values())

    async def end(self, hurry: asyncio.Event) -> None:
        """Ask all processes to end, then make them: SIGTERM, a grace that ``hurry`` cuts short, SIGKILL."""
        self._ending = True
        if self._nursery is not None:
            self._nursery.end()
        for worker in self._spares.workers:
            worker.process.kill()
        await end_all([worker.process for worker in self._alive], self._options.grace_s, hurry)
        await self._tasks.close()
        await self._server.close()
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.close)
        await asyncio.to_thread(self._logs.stop)
