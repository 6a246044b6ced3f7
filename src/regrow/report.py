"""Tell from a run's events what failed, what was done about it and why, what it moved, and where the time went.

Reads events and nothing else; changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow import events

Event = dict[str, Any]

_EARLY_S = 1.0
_PHASES = (
    "severed",
    "replacement ready",
    "reconnected",
    "planned",
    "transferred",
    "resumed",
    "replayed",
    "set up anew",
)
_OPTIONAL = frozenset({"replayed", "set up anew"})
"""Phases that most failures do not have: only a stage of a pipeline without a replica is replayed; all start anew where
that is the policy, or nothing is left to go on from."""
_PHASE_OF = {
    "woken": "severed",
    "replacement_ready": "replacement ready",
    "joined": "reconnected",
    "plan": "planned",
    "transferred": "transferred",
    "resumed": "resumed",
    "replayed": "replayed",
    "training": "set up anew",
}


@dataclass(frozen=True)
class Failure:
    """One generation: what began it and when each phase was complete on all ranks (seconds since it was noticed)."""

    generation: int
    noticed_t: float
    who: tuple[str, ...]
    reason: str
    plan: tuple[str, ...]
    bytes_in: int
    transfer_s: float
    shared: str
    reached_s: dict[str, float]
    step: int | None
    ended: str

    @property
    def total_s(self) -> float | None:
        """From being noticed until the last rank went on, replays included; None if that never came."""
        went_on = _went_on(self.reached_s)
        return None if went_on is None else max(went_on, self.reached_s.get("replayed", 0.0))


def _went_on(reached: dict[str, float]) -> float | None:
    """Return when all trained again: with the state that they were given, or after another set-up."""
    return reached.get("resumed", reached.get("set up anew"))


def failures(run: Iterable[Event]) -> list[Failure]:
    """Return one ``Failure`` per generation, oldest first."""
    ordered = list(run)
    starts = [index for index, event in enumerate(ordered) if event["event"] == "generation"]
    return [_failure(ordered, index) for index in starts]


def _failure(run: list[Event], index: int) -> Failure:
    start = run[index]
    generation = start["generation"]
    lost = start.get("lost") or []
    noticed_t = min([float(loss["t"]) for loss in lost if "t" in loss], default=float(start["t"]))
    mine = [event for event in run if event.get("generation") == generation]
    reached: dict[str, float] = {}
    for event in mine:
        phase = _PHASE_OF.get(event["event"])
        if phase is not None:
            reached[phase] = max(reached.get(phase, 0.0), float(event["t"]) - noticed_t)
    for event in run:  # who was woken by the broken connection itself did not know the new generation yet
        early = event["event"] == "woken" and event.get("generation") == generation - 1
        if early and float(event["t"]) > noticed_t - _EARLY_S:
            reached["severed"] = max(reached.get("severed", 0.0), float(event["t"]) - noticed_t)
    moved = [event for event in mine if event["event"] == "transferred"]
    replayed = [event for event in mine if event["event"] == "replayed"]
    who = []
    for loss in lost:
        last = [event for event in run if event["event"] == "worker_lost" and event.get("rank") == loss["rank"]]
        near = min(last, key=lambda event: abs(float(event["t"]) - noticed_t), default={})
        at = "" if near.get("step") is None else f" at step {near['step']}"
        who.append(f"rank {loss['rank']} died ({loss['why']}){at}")
    plan = next((event for event in mine if event["event"] == "plan"), {})
    steps = [
        event["step"] for event in mine if event["event"] in ("resumed", "begun_from") and event.get("step") is not None
    ]
    if not steps and "set up anew" in reached:
        steps = [0]
    return Failure(
        generation=generation,
        noticed_t=noticed_t,
        who=tuple(who),
        reason=str(start.get("reason", "")),
        plan=tuple(map(str, plan.get("lines", ()))),
        bytes_in=sum(int(event.get("bytes_in") or 0) for event in (*moved, *replayed)),
        transfer_s=max([float(event.get("seconds") or 0.0) for event in moved], default=0.0),
        shared=_shared(mine),
        reached_s=reached,
        step=max(steps, default=None),
        ended=_how_it_ended(run, index, reached),
    )


def _shared(mine: list[Event]) -> str:
    """Say how many steps of a replay were done with how many helpers, and how long each took."""
    for event in mine:
        if event["event"] == "replay_shared" and event.get("why_not"):
            return f"not at all: {event['why_not']}"
        if event["event"] == "replay_shared":
            parts = [
                f"{_count(steps, 'step')} {'alone' if size == '0' else 'with ' + _count(int(size), 'helper')} "
                f"({event['seconds'][size]:.3f} s each)"
                for size, steps in event["steps"].items()
            ]
            return ", ".join(parts)
    return ""


def _how_it_ended(run: list[Event], index: int, reached: dict[str, float]) -> str:
    went_on = _went_on(reached)
    for event in run[index + 1 :]:
        if event["event"] == "generation" and (went_on is None or float(run[index]["t"]) + went_on > float(event["t"])):
            return f"overtaken by generation {event['generation']}"
        if event["event"] == "failed" and went_on is None:
            return f"the run failed: {event.get('reason', '')}"
    return "" if went_on is not None else "nobody said that it went on"


def render(run: list[Event]) -> str:
    """Return the report on one run."""
    first = run[0]
    began = next((event for event in run if event["event"] == "run_started"), first)
    ended = next((event for event in reversed(run) if event["event"] in ("done", "failed")), None)
    size = f", {_count(began['world_size'], 'worker')}" if "world_size" in began else ""
    policy = "" if began.get("policy", "ladder") == "ladder" else f", policy {began['policy']}"
    lines = [f"run {first.get('run', '?')}{size}{policy}, started {_date(began['t'])}"]
    found = failures(run)
    for failure in found:
        lines += ["", *_block(failure)]
    healed = [failure.total_s for failure in found if failure.total_s is not None and not failure.ended]
    replaced = sum(len(failure.who) for failure in found)
    lines.append("")
    lines.append(
        f"{_count(len(found), 'failure')}, {_count(replaced, 'worker')} lost, healed {_count(len(healed), 'time')}"
    )
    if healed:
        lines.append(
            f"time until training went on: {sum(healed):.3f} s in all, "
            f"{sum(healed) / len(healed):.3f} s on average, {max(healed):.3f} s at most"
        )
    lines.append(f"moved in all: {_bytes(sum(failure.bytes_in for failure in found))}")
    lines += _snapshots(run) + _checkpoints(run)
    if ended is None:
        lines.append("the run has no end: it goes on, or its agent was killed")
    else:
        took = float(ended["t"]) - float(began["t"])
        lines.append(f"{ended['event']} after {took:.1f} s: {ended.get('reason', '')}")
    return "\n".join(lines)


def _snapshots(run: list[Event]) -> list[str]:
    """Say what snapshots in the hosts' memory have cost, for the rank that paid most."""
    told = [event for event in run if event["event"] == "snapshots" and event.get("taken")]
    if not told:
        return []
    most = max(told, key=lambda event: float(event["waited_s"]))
    return [
        f"snapshots: {most['taken']} of {_bytes(int(most['bytes']))} on rank {most['rank']}, copied in "
        f"{float(most['copy_s']):.4f} s each, for which each update waited {float(most['waited_s']):.4f} s"
    ]


def _checkpoints(run: list[Event]) -> list[str]:
    """Say how many checkpoints are on storage, and what they have cost the rank that paid most."""
    done = [event for event in run if event["event"] == "disk_committed"]
    if not done:
        return []
    newest = max(done, key=lambda event: float(event["t"]))
    told = [float(event["waited_s"]) for event in run if event["event"] == "disk"]
    waited = f", for which updates waited {max(told):.4f} s since the last set-up" if told else ""
    return [
        f"checkpoints: of {_count(len({event['step'] for event in done}), 'step')}, {_bytes(int(newest['bytes']))} "
        f"each, the last one of step {newest['step']}{waited}"
    ]


def _block(failure: Failure) -> list[str]:
    title = "; ".join(failure.who) if failure.who else "nobody died"
    lines = [f"generation {failure.generation}: {title}", f"  why      {failure.reason}"]
    for number, line in enumerate(failure.plan):
        lines.append(f"  {'plan' if number == 0 else '':8} {line}")
    speed = f" in {failure.transfer_s:.3f} s" if failure.transfer_s > 0 else ""
    lines.append(f"  moved    {_bytes(failure.bytes_in)}{speed}")
    if failure.shared:
        lines.append(f"  shared   {failure.shared}")
    lines.append(f"  {'noticed':18} {_clock(failure.noticed_t)}")
    before = 0.0
    for phase in _PHASES:
        at = failure.reached_s.get(phase)
        if at is None and (phase in _OPTIONAL or "set up anew" in failure.reached_s):
            continue
        if at is None:
            lines.append(f"  {phase:18} -")
            continue
        lines.append(f"  {phase:18} {max(at - before, 0.0):7.3f} s   (after {at:.3f} s)")
        before = max(before, at)
    total = "-" if failure.total_s is None else f"{failure.total_s:7.3f} s"
    again = "" if failure.step is None or failure.total_s is None else f"   (training went on with step {failure.step})"
    lines.append(f"  {'total':18} {total}{again}")
    if failure.ended:
        lines.append(f"  {failure.ended}")
    return lines


def print_report(directory: Path | str) -> int:
    """Print the reports on all runs in a log directory; return the exit code."""
    path = Path(directory)
    if not path.is_dir():
        print(f"regrow report: error: {path} is not a directory", file=sys.stderr)
        return 1
    found = events.read(path)
    if not found:
        print(f"regrow report: error: no events in {path} (give the log directory of a run)", file=sys.stderr)
        return 1
    by_run: dict[str, list[Event]] = {}
    for event in found:
        by_run.setdefault(str(event.get("run", "?")), []).append(event)
    print("\n\n".join(render(run) for run in by_run.values()))
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _clock(t: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(t))}.{int(t % 1 * 1000):03d}"


def _date(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
