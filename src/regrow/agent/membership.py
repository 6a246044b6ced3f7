"""Decide what becomes of the world when something happens to it. Pure: no clock, no sockets, no processes.

``decide(world, event)`` returns the next world and the reason in words. Agents apply it by compare-and-set on one key,
so any agent may report what happened to its own workers and none has to lead. An event that comes late, or twice, or
from a process that has been replaced meanwhile changes nothing: incarnations and generations fence it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from regrow.agent.world import Loss, Phase, Raised, World

SAME_EXCEPTION_LIMIT = 3
"""An exception that comes at the same rank and step this many times is a bug, not bad luck."""


@dataclass(frozen=True)
class SetupDone:
    """A rank's set-up is complete; it enters the training loop."""

    rank: int
    incarnation: int
    t: float = 0.0


@dataclass(frozen=True)
class LostWorker:
    """One worker's end. ``step`` is the last it told of; ``raised`` is set if it ended by an exception of its own."""

    rank: int
    incarnation: int
    why: str
    step: int | None = None
    raised: Raised | None = None


@dataclass(frozen=True)
class Lost:
    """Workers are gone; losses that are noticed together cost one generation together."""

    workers: tuple[LostWorker, ...]
    t: float = 0.0


@dataclass(frozen=True)
class Resumed:
    """A rank holds training state again and goes on at this generation."""

    rank: int
    incarnation: int
    generation: int
    t: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A rank has completed its last step at this generation."""

    rank: int
    incarnation: int
    generation: int
    t: float = 0.0


@dataclass(frozen=True)
class Suspect:
    """A rank's connection broke though its agent knows of nobody's death."""

    rank: int
    incarnation: int
    generation: int
    why: str
    t: float = 0.0


@dataclass(frozen=True)
class Exited:
    """A rank's process ended with exit code 0."""

    rank: int
    incarnation: int
    step: int | None = None
    t: float = 0.0


@dataclass(frozen=True)
class Stopped:
    """Somebody asked a node's agent to stop, or the agent cannot go on."""

    node: int
    why: str
    exit_code: int
    t: float = 0.0


Event = SetupDone | Lost | Resumed | Finished | Suspect | Exited | Stopped


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
        case Stopped():
            return _failed(world, event.why, event.t, exit_code=event.exit_code)
        case SetupDone() | Resumed() | Finished() | Suspect() | Exited():
            if event.incarnation != world.incarnation[event.rank]:
                return Decision(world, f"ignored: rank {event.rank} has been replaced since")
            if isinstance(event, Resumed | Finished | Suspect) and event.generation != world.generation:
                return Decision(world, f"ignored: generation {event.generation} is over, it is {world.generation} now")
            return _from_worker(world, event)
        case _:
            assert_never(event)


def _from_worker(world: World, event: SetupDone | Resumed | Finished | Suspect | Exited) -> Decision:
    match event:
        case SetupDone():
            return _setup_done(world, event)
        case Resumed():
            if world.phase is not Phase.TRAINING or event.rank in world.holders:
                return Decision(world, f"rank {event.rank} goes on")
            reason = f"rank {event.rank} holds the state again"
            world = _setup_worked(world, event.rank)
            return Decision(replace(world, holders=_with(world.holders, event.rank), t=event.t, reason=reason), reason)
        case Finished():
            if world.phase is not Phase.TRAINING or event.rank in world.finished:
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
    world = _setup_worked(world, event.rank)
    if len(ready) < world.world_size:
        reason = f"rank {event.rank} is set up, {len(ready)} of {world.world_size}"
        return Decision(replace(world, ready=ready, t=event.t, reason=reason), reason)
    everyone = tuple(range(world.world_size))
    reason = "all ranks are set up: training begins"
    begun = replace(world, phase=Phase.TRAINING, ready=ready, holders=everyone, t=event.t, reason=reason)
    return Decision(begun, reason)


def _suspect(world: World, event: Suspect) -> Decision:
    if world.phase is not Phase.TRAINING:
        return Decision(world, "ignored: set-up cannot be healed, the rank's own error will end it")
    if world.all_finished:
        return Decision(world, "ignored: all have finished, connections end")
    if world.exited:
        return _left_early(world, event.t)
    reason = f"rank {event.rank} lost a connection though nobody died ({event.why}): all reconnect"
    return Decision(
        replace(world, generation=world.generation + 1, finished=(), lost=(), t=event.t, reason=reason), reason
    )


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
    workers = [worker for worker in event.workers if worker.incarnation == world.incarnation[worker.rank]]
    if not workers:
        return Decision(world, "ignored: these processes have been replaced since")
    first = workers[0]
    if world.all_finished:
        sentence = f"rank {first.rank} died ({first.why}) after the last step, in code that regrow does not protect"
        return _failed(world, sentence, event.t, evidence=first.raised.traceback if first.raised else "")
    if world.phase is Phase.TRAINING and world.exited:
        return _left_early(world, event.t)

    raised = dict(world.raised)
    for worker in workers:
        if worker.raised is not None:
            key = f"{worker.rank}@{worker.step}"
            known = raised.get(key)
            raised[key] = replace(known, count=known.count + 1) if known is not None else worker.raised
    world = replace(world, raised=raised, restarts=world.restarts + len(workers))
    for worker in workers:
        if worker.raised is not None and worker.raised.fatal:
            sentence = f"rank {worker.rank}: {worker.raised.kind}: {worker.raised.message}"
            return _failed(world, sentence, event.t, evidence=worker.raised.traceback)
        again = raised.get(f"{worker.rank}@{worker.step}")
        if worker.raised is not None and again is not None and again.count >= SAME_EXCEPTION_LIMIT:
            where = "during set-up" if worker.step is None else f"at step {worker.step}"
            sentence = (
                f"rank {worker.rank} failed {where} {again.count} times with {again.kind}: {again.message} "
                "(a replacement would only fail again; the first traceback is shown)"
            )
            return _failed(world, sentence, event.t, evidence=again.traceback)
    if world.restarts > world.max_restarts:
        sentence = (
            f"{world.restarts} workers were lost, more than --max-restarts {world.max_restarts} allows; "
            f"the last was rank {first.rank} ({first.why})"
        )
        return _failed(world, sentence, event.t)

    gone = {worker.rank for worker in workers}
    lost = tuple(Loss(worker.rank, worker.why, event.t) for worker in workers)
    who = ", ".join(f"rank {worker.rank} ({worker.why})" for worker in workers)
    world = replace(world, generation=world.generation + 1, finished=(), lost=lost, t=event.t)
    if world.phase is Phase.SETUP:
        return _from_the_beginning(world, f"{who} lost during set-up: nothing was trained yet, so all start again")
    holders = tuple(rank for rank in world.holders if rank not in gone)
    if not holders:
        return _from_the_beginning(
            world, f"{who} lost and no one holds the training state any more: the run starts again from its beginning"
        )
    incarnation = tuple(n + (rank in gone) for rank, n in enumerate(world.incarnation))
    reason = f"{who} lost: replaced, all others keep their state"
    return Decision(replace(world, incarnation=incarnation, holders=holders, reason=reason), reason)


def _from_the_beginning(world: World, reason: str) -> Decision:
    fresh = replace(
        world,
        phase=Phase.SETUP,
        incarnation=tuple(n + 1 for n in world.incarnation),
        ready=(),
        holders=(),
        finished=(),
        exited={},
        reason=reason,
    )
    return Decision(fresh, reason)


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
