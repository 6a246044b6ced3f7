"""Judge from a worker's signs of life whether it is dead, stuck or well. Pure: the time is passed in.

A process that is gone is noticed elsewhere, at once. This is about those that exist and do nothing:
stopped, hung in the kernel, waiting for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What the agent has to do: nothing, or kill and replace."""

    WELL = "well"
    DEAD = "dead"
    STUCK = "stuck"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each kind of silence may last, in seconds."""

    dead_after_s: float
    stuck_after_s: float


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """When a worker last gave each sign of life, on the agent's monotonic clock."""

    heartbeat_t: float
    cpu_t: float
    progress_t: float
    waiting: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Judgement:
    """The verdict and the reason in words."""

    verdict: Verdict
    reason: str


def judge(now: float, vitals: Vitals, limits: Limits) -> Judgement:
    """Return whether the worker may go on.

    No heartbeat but CPU time that grows is a long call that holds the interpreter's lock: allowed until
    ``stuck_after_s``. A worker that waits for others makes no progress and is not to blame for it.
    """
    silent_s = now - vitals.heartbeat_t
    if silent_s > limits.dead_after_s:
        if vitals.stopped:
            return Judgement(Verdict.DEAD, f"stopped, no heartbeat for {silent_s:.1f} s")
        if now - vitals.cpu_t > limits.dead_after_s:
            return Judgement(Verdict.DEAD, f"no heartbeat and no CPU time for {silent_s:.1f} s")
    if silent_s > limits.stuck_after_s:
        return Judgement(Verdict.STUCK, f"no heartbeat for {silent_s:.1f} s though it uses the CPU")
    idle_s = now - vitals.progress_t
    if idle_s > limits.stuck_after_s and not vitals.waiting:
        return Judgement(Verdict.STUCK, f"no progress for {idle_s:.1f} s though it is not waiting for others")
    return Judgement(Verdict.WELL, "")
