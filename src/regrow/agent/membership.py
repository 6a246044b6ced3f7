"""Decide what becomes of the world when something happens to it. Pure: no clock, no sockets, no processes.

``decide(world, event)`` returns the next world and the reason in words. Agents apply it by compare-and-set on one key.
Any agent may report what happened to its own workers; that a host is lost, only the leader says. An event that comes
late, or twice, or from what has been replaced meanwhile changes nothing: incarnations, generations, the sessions of
hosts and the epochs of leaders fence it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from regrow.agent.happenings import (
    Event,
    Exited,
    Finished,
    Forgotten,
    Led,
    Lost,
    LostWorker,
    NodeJoined,
    NodeLost,
    Resumed,
    SetupDone,
    Stopped,
    Suspect,
)
from regrow.agent.homes import evict, settle
from regrow.agent.world import Loss, Node, Phase, World
from regrow.rules import Policy

SAME_EXCEPTION_LIMIT = 3
"""An exception that comes at the same rank and step this many times is a bug, not bad luck."""


@dataclass(frozen=True)
class Decision:
    """The next world (the same object if nothing changes) and why."""

    world: World
    reason: str


def decide(world: World, event: Event) -> Decision:
    """Return what the event makes of the world."""
    if world.over:
        return Decision(world, f"ignored: the run is over ({world.phase})")
    match event:
        case Lost():
            return _lost(world, event)
        case NodeJoined():
            return _joined(world, event)
        case Led():
            return _led(world, event)
        case Stopped():
            return _failed(world, event.why, event.t, exit_code=event.exit_code)
        case SetupDone() | Resumed() | Forgotten() | Finished() | Suspect() | Exited():
            if event.incarnation != world.incarnation[event.rank]:
                return Decision(world, f"ignored: rank {event.rank} has been replaced since")
            if isinstance(event, Resumed | Forgotten | Finished | Suspect) and event.generation != world.generation:
                return Decision(world, f"ignored: generation {event.generation} is over, it is {world.generation} now")
            return _from_worker(world, event)
        case _:
            assert_never(event)


def _from_worker(world: World, event: SetupDone | Resumed | Forgotten | Finished | Suspect | Exited) -> Decision:
    match event:
        case SetupDone():
            return _setup_done(world, event)
        case Resumed():
            if world.phase is not Phase.TRAINING or event.rank in world.holders:
                return Decision(world, f"rank {event.rank} goes on")
            reason = f"rank {event.rank} holds the state again"
            world = _setup_worked(world, event.rank)
            return Decision(replace(world, holders=_with(world.holders, event.rank), t=event.t, reason=reason), reason)
        case Forgotten():
            return _forgotten(world, event)
        case Finished():
            # a run that finds all its steps done may be through before another rank has said that it is set up
            set_up = world.phase is Phase.TRAINING or event.rank in world.ready
            if not set_up or event.rank in world.finished:
                return Decision(world, f"ignored: rank {event.rank} cannot finish in {world.phase}, or has already")
            reason = f"rank {event.rank} has completed its last step"
            return Decision(
                replace(world, finished=_with(world.finished, event.rank), t=event.t, reason=reason), reason
            )
        case Suspect():
            return _suspect(world, event)
        case Exited():
            return _exited(world, event)
        case _:
            assert_never(event)


def _setup_done(world: World, event: SetupDone) -> Decision:
    if world.phase is not Phase.SETUP or event.rank in world.ready:
        return Decision(world, f"rank {event.rank} is set up")
    if world.exited:
        gone = min(world.exited)
        return _failed(world, f"rank {gone} ended during set-up while rank {event.rank} goes on to train", event.t)
    ready = _with(world.ready, event.rank)
    world = replace(_setup_worked(world, event.rank), kept=event.kept and (world.kept or not world.ready))
    if len(ready) < world.world_size:
        reason = f"rank {event.rank} is set up, {len(ready)} of {world.world_size}"
        return Decision(replace(world, ready=ready, t=event.t, reason=reason), reason)
    everyone = tuple(range(world.world_size))
    reason = "all ranks are set up: training begins"
    took_s = max(0.0, event.t - world.setup_t)
    begun = replace(
        world, phase=Phase.TRAINING, ready=ready, holders=everyone, setup_s=took_s, t=event.t, reason=reason
    )
    return Decision(begun, reason)


def _forgotten(world: World, event: Forgotten) -> Decision:
    if world.phase is not Phase.TRAINING or (world.holders and not event.everyone):
        return Decision(world, f"ignored: rank {event.rank} asks for a new beginning, but others hold state")
    begun = _from_the_beginning(replace(world, generation=world.generation + 1, finished=(), lost=(), t=event.t))
    why = event.why if event.everyone else f"nobody holds the training state any more ({event.why})"
    reason = f"{why}: the run starts again from its beginning"
    return Decision(replace(begun, reason=reason), reason)


def _joined(world: World, event: NodeJoined) -> Decision:
    """A host comes. Whoever had its number before is gone: the store gave the place away."""
    known = world.nodes.get(event.node)
    if known is not None and known.session == event.session:
        return Decision(world, f"ignored: node {event.node} has joined already, and a session does not come back")
    if known is not None and known.alive:
        gone = NodeLost(event.node, known.session, "another has its place")
        world = _lost(world, Lost((), event.t, (gone,))).world
        if world.over:
            return Decision(world, world.reason)
    nodes = {**world.nodes, event.node: Node(event.session, event.slots, event.standby)}
    settled = settle(replace(world, nodes=nodes, t=event.t), world)
    if world.phase is Phase.SETUP and world.homeless:
        settled = replace(settled, setup_t=event.t)
    reason = f"node {event.node} has joined{_moved(world.homeless, settled)}"
    return Decision(replace(settled, reason=reason), reason)


def _led(world: World, event: Led) -> Decision:
    if world.leader == event.session or not world.knows(event.node, event.session):
        return Decision(world, f"ignored: node {event.node} leads already, or is no member")
    reason = f"node {event.node} leads"
    return Decision(replace(world, epoch=world.epoch + 1, leader=event.session, t=event.t, reason=reason), reason)


def _suspect(world: World, event: Suspect) -> Decision:
    if world.phase is not Phase.TRAINING:
        return Decision(world, "ignored: set-up cannot be healed, the rank's own error will end it")
    if world.all_finished:
        return Decision(world, "ignored: all have finished, connections end")
    if world.exited:
        return _left_early(world, event.t)
    what = f"rank {event.rank} lost a connection though nobody died ({event.why})"
    if world.restart:
        world = replace(world, restarts=world.restarts + 1)
        if (failed := _enough(world, what, event.t)) is not None:
            return failed
    world = replace(world, generation=world.generation + 1, finished=(), lost=(), t=event.t)
    reason = f"{what}: {_restart_said(world) if world.restart else 'all reconnect'}"
    if world.restart:
        world = _from_the_beginning(world)
    return Decision(replace(world, reason=reason), reason)


def _exited(world: World, event: Exited) -> Decision:
    if event.rank in world.exited:
        return Decision(world, f"ignored: rank {event.rank} is known to have ended")
    exited = {**world.exited, event.rank: event.step}
    if len(exited) == world.world_size:
        reason = "all workers have ended with exit code 0"
        return Decision(replace(world, exited=exited, phase=Phase.DONE, exit_code=0, t=event.t, reason=reason), reason)
    if world.phase is Phase.SETUP and world.ready:
        return _failed(
            world, f"rank {event.rank} ended during set-up while rank {world.ready[0]} goes on to train", event.t
        )
    if world.phase is Phase.TRAINING and event.rank not in world.holders:
        return _failed(
            world, f"rank {event.rank}'s replacement ended (exit code 0) before it took up its state", event.t
        )
    reason = f"rank {event.rank} has ended with exit code 0"
    return Decision(replace(world, exited=exited, t=event.t, reason=reason), reason)


def _lost(world: World, event: Lost) -> Decision:
    before = world
    nodes = [
        node for node in event.nodes if event.epoch in (None, world.epoch) and world.knows(node.node, node.session)
    ]
    workers = [worker for worker in event.workers if worker.incarnation == world.incarnation[worker.rank]]
    if not workers and not nodes:
        return Decision(world, "ignored: these have been replaced since, or it is no longer theirs to say who is lost")
    who = [f"rank {worker.rank} ({worker.why})" for worker in workers]
    for node in nodes:
        known = {*world.exited, *(worker.rank for worker in workers)}
        with_it = [rank for rank in world.ranks_of(node.node) if rank not in known]
        why = f"its host, node {node.node}: {node.why}"
        workers += [LostWorker(rank, world.incarnation[rank], why) for rank in with_it]
        who.append(f"node {node.node} ({node.why}){f' with {_ranks(with_it)}' if with_it else ''}")
    world = evict(world, (node.node for node in nodes))
    if not workers:
        reason = f"{', '.join(who)} lost: nobody lived there"
        return Decision(replace(world, t=event.t, reason=reason), reason)
    if (failed := _no_use(world, workers, event.t)) is not None:
        return failed
    world = _counted(world, workers)
    if (failed := _too_often(world, workers, event.t)) is not None:
        return failed

    gone = {worker.rank for worker in workers}
    lost = tuple(Loss(worker.rank, worker.why, event.t) for worker in workers)
    world = replace(world, generation=world.generation + 1, finished=(), lost=lost, t=event.t)
    holders = tuple(rank for rank in world.holders if rank not in gone)
    if world.restart:
        world = _from_the_beginning(world)
        reason = f"{', '.join(who)} lost: {_restart_said(world)}"
    elif world.phase is Phase.SETUP:
        world = _from_the_beginning(world)
        reason = f"{', '.join(who)} lost during set-up: nothing was trained yet, so all start again"
    elif not holders and not world.kept:
        world = _from_the_beginning(world)
        reason = (
            f"{', '.join(who)} lost and no one holds the training state any more: "
            "the run starts again from its beginning"
        )
    else:
        incarnation = tuple(n + (rank in gone) for rank, n in enumerate(world.incarnation))
        world = replace(world, incarnation=incarnation, holders=holders)
        reason = f"{', '.join(who)} lost: replaced, {_rest(world, holders)}"
    moved = world.homeless
    world = settle(world, before)
    reason += _moved(moved, world)
    return Decision(replace(world, reason=reason), reason)


def _rest(world: World, holders: tuple[int, ...]) -> str:
    """Say what becomes of those who were not lost."""
    if world.policy is not Policy.LADDER:
        return "and everyone goes back to what was saved"
    return "all others keep their state" if holders else "what nobody holds any more is in the memory of hosts"


def _no_use(world: World, workers: list[LostWorker], t: float) -> Decision | None:
    """Return how the run ends if it is too late to replace anybody."""
    first = workers[0]
    if world.all_finished:
        sentence = f"rank {first.rank} died ({first.why}) after the last step, in code that regrow does not protect"
        return _failed(world, sentence, t, evidence=first.raised.traceback if first.raised else "")
    if world.phase is Phase.TRAINING and world.exited:
        return _left_early(world, t)
    return None


def _counted(world: World, workers: list[LostWorker]) -> World:
    raised = dict(world.raised)
    for worker in workers:
        if worker.raised is not None:
            key = f"{worker.rank}@{worker.step}"
            known = raised.get(key)
            raised[key] = replace(known, count=known.count + 1) if known is not None else worker.raised
    return replace(world, raised=raised, restarts=world.restarts + (1 if world.restart else len(workers)))


def _too_often(world: World, workers: list[LostWorker], t: float) -> Decision | None:
    """Return how the run ends if a replacement would only fail again, or enough were lost."""
    for worker in workers:
        if worker.raised is not None and worker.raised.fatal:
            sentence = f"rank {worker.rank}: {worker.raised.kind}: {worker.raised.message}"
            return _failed(world, sentence, t, evidence=worker.raised.traceback)
        again = world.raised.get(f"{worker.rank}@{worker.step}")
        if worker.raised is not None and again is not None and again.count >= SAME_EXCEPTION_LIMIT:
            where = "during set-up" if worker.step is None else f"at step {worker.step}"
            sentence = (
                f"rank {worker.rank} failed {where} {again.count} times with {again.kind}: {again.message} "
                "(a replacement would only fail again; the first traceback is shown)"
            )
            return _failed(world, sentence, t, evidence=again.traceback)
    first = workers[0]
    return _enough(world, f"the last was rank {first.rank} ({first.why})", t)


def _enough(world: World, last: str, t: float) -> Decision | None:
    """Return how the run ends if more was lost than it may lose."""
    if world.restarts <= world.max_restarts:
        return None
    what = "all would have to start anew once more" if world.restart else f"{world.restarts} workers were lost, more"
    return _failed(world, f"{what} than --max-restarts {world.max_restarts} allows; {last}", t)


def _restart_said(world: World) -> str:
    return f"restart {world.restarts} of {world.max_restarts} at most, all workers are killed and start from storage"


def _from_the_beginning(world: World) -> World:
    return replace(
        world,
        phase=Phase.SETUP,
        incarnation=tuple(n + 1 for n in world.incarnation),
        ready=(),
        holders=(),
        kept=False,
        finished=(),
        exited={},
        setup_t=world.t,
    )


def _moved(ranks: tuple[int, ...], world: World) -> str:
    """Say where ranks without a home went."""
    there: dict[int | None, list[int]] = {}
    for rank in ranks:
        there.setdefault(world.homes[rank], []).append(rank)
    parts = [
        f"{_ranks(some)} wait{'s' if len(some) == 1 else ''} for a host"
        if node is None
        else f"{_ranks(some)} now on node {node}"
        for node, some in there.items()
    ]
    return f"; {', '.join(parts)}" if parts else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _left_early(world: World, t: float) -> Decision:
    rank = min(set(world.exited) - set(world.finished), default=min(world.exited))
    return _failed(world, f"rank {rank} left the training loop at step {world.exited[rank]} while others go on", t)


def _failed(world: World, sentence: str, t: float, *, evidence: str = "", exit_code: int = 1) -> Decision:
    failed = replace(world, phase=Phase.FAILED, reason=sentence, evidence=evidence, exit_code=exit_code, t=t)
    return Decision(failed, sentence)


def _setup_worked(world: World, rank: int) -> World:
    """Set-up failures count only in a row: one that worked wipes them out."""
    return replace(world, raised={key: value for key, value in world.raised.items() if key != f"{rank}@None"})


def _with(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(sorted({*ranks, rank}))
