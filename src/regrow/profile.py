"""``regrow profile``: from the events of a pipeline run, the profile that ``regrow plan logging`` reads.

A chain of machines, each with the seconds that its replay is expected to take, and the bytes per step from one to the
next. Reads events and nothing else. What is no chain, or was hardly measured, is refused with a sentence.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from regrow import events
from regrow.sizes import parse_bytes

Event = dict[str, Any]

_KINDS = ("stage_profile", "link_rate")
_LEAST_STEPS = 3
_NEGLIGIBLE = 0.01
"""Traffic past the neighbours is left out below this part of the smallest boundary's."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank has measured of its steps."""

    rank: int
    stage: int
    host: int
    world: int
    steps: int
    busy_s: float
    sent_bytes: dict[int, float]
    checkpoint_every: int

    @classmethod
    def read(cls, event: Event) -> Measured | None:
        """Return what an event says, or ``None`` if it is damaged."""
        try:
            found = cls(
                rank=int(event["rank"]),
                stage=int(event["stage"]),
                host=int(event["node"]),
                world=int(event["world"]),
                steps=int(event["steps"]),
                busy_s=float(event["busy_s"] or 0.0),
                sent_bytes={int(peer): float(count) for peer, count in event["sent_bytes"].items()},
                checkpoint_every=int(event["checkpoint_every"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        numbers = (found.busy_s, *found.sent_bytes.values())
        ranks = (found.rank, *found.sent_bytes)
        sound = all(math.isfinite(number) and number >= 0 for number in numbers)
        return found if sound and all(0 <= rank < found.world for rank in ranks) else None


@dataclass(frozen=True)
class Profile:
    """A chain of machines in the format of ``regrow plan logging``, and what a person should know about it."""

    replay_s: list[float]
    boundary_bytes: list[float]
    bandwidth: float
    checkpoint_every: int
    ranks_per_machine: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the file's text."""
        fields = {name: value for name, value in vars(self).items() if name != "notes"}
        return json.dumps(fields, indent=2)


def make_profile(
    found: Iterable[Event],
    *,
    per: str | None = None,
    bandwidth: float | None = None,
    checkpoint_every: int | None = None,
) -> Profile:
    """Return the profile of the pipeline that was started last.

    ``replay_s`` of a machine: the seconds that its stages compute in a step, added up, since within a step one waits
    for the other; times half the steps between checkpoints, since a failure comes on average in the middle between
    two. Replicas of a stage compute side by side: the slowest one counts.
    """
    run = _last_start(found)
    rows, notes = _rows(run)
    if per is None:
        per = "host" if len({row.host for row in rows}) > 1 else "rank"
    machines = _machines(rows, per)
    every = _interval(rows, checkpoint_every)
    boundaries, more = _boundaries(machines)
    return Profile(
        replay_s=[_busy_s(machine) * every / 2 for machine in machines],
        boundary_bytes=boundaries,
        bandwidth=bandwidth if bandwidth is not None else _bandwidth(run, machines),
        checkpoint_every=every,
        ranks_per_machine=len(machines[0]),
        notes=(*notes, *more),
    )


def _last_start(found: Iterable[Event]) -> list[Event]:
    """Return what the ranks of the pipeline that was started last have told: a directory may hold several runs."""
    told = [event for event in found if event["event"] in _KINDS and "pipeline" in event]
    if not told:
        raise ValueError(
            "these are not the events of a pipeline, whose ranks say run.protect(stage=...): only pipelines keep "
            "journals, so there is nothing to plan"
        )
    return [event for event in told if event["pipeline"] == told[-1]["pipeline"]]


def _rows(run: Sequence[Event]) -> tuple[list[Measured], list[str]]:
    """Return each rank's best measurement, by rank, and what was wrong with others.

    A process counts its own steps, so the one with the most steps counts, and not a replacement that has just begun.
    """
    told = [event for event in run if event["event"] == "stage_profile"]
    read = [row for event in told if (row := Measured.read(event)) is not None]
    damaged = len(told) - len(read)
    notes = [f"damaged events that were left out: {damaged}"] if damaged else []
    best: dict[int, Measured] = {}
    for row in read:
        if row.rank not in best or row.steps >= best[row.rank].steps:
            best[row.rank] = row
    world = max((row.world for row in read), default=0)
    missing = [rank for rank in range(world) if rank not in best or best[rank].steps < _LEAST_STEPS]
    if missing or not world:
        who = f"rank{'s' if len(missing) > 1 else ''} {_list(missing)}" if missing else "the ranks"
        raise ValueError(
            f"too few steps were measured on {who}: let the run go on for at least {_LEAST_STEPS} steps after the "
            "first two; a rank tells of them after the first dozen, then every half minute, and at the end"
            + "".join(f" ({note})" for note in notes)
        )
    return [best[rank] for rank in range(world)], notes


def _machines(rows: Sequence[Measured], per: str) -> list[list[Measured]]:
    """Return the ranks of each machine, in the order of the stages.

    ``plan logging`` names machines by ranges of ranks, so they must lie like that: alike, and in this order.
    """
    by_name: dict[int, list[Measured]] = {}
    for row in rows:
        by_name.setdefault(row.host if per == "host" else row.stage, []).append(row)
    machines = sorted(by_name.values(), key=lambda machine: min(row.stage for row in machine))
    if len(machines) == 1:
        remedy = "--per rank takes each rank as a machine" if per == "host" else "a pipeline has at least two"
        raise ValueError(f"there is one {per if per == 'host' else 'stage'} only, so nothing to group: {remedy}")
    for stage in sorted({row.stage for row in rows}):
        hosts = sorted({row.host for row in rows if row.stage == stage})
        if per == "host" and len(hosts) > 1:
            raise ValueError(
                f"stage {stage} has replicas on hosts {_list(hosts)}: what a lost host held is copied from them and "
                "not replayed, so that there is nothing to plan for hosts; --per rank plans for the stages"
            )
    ordered = [row.rank for machine in machines for row in machine]
    if ordered != sorted(ordered) or len({len(machine) for machine in machines}) > 1:
        names = " | ".join(_list(row.rank for row in machine) for machine in machines)
        raise ValueError(
            f"the machines in the order of their stages have the ranks {names}, but failure domains are ranges of "
            "ranks: give stages to the ranks in their order, replicas of a stage to neighbouring ranks, and as many "
            "ranks to each machine"
        )
    return machines


def _busy_s(machine: Sequence[Measured]) -> float:
    slowest: dict[int, float] = {}
    for row in machine:
        slowest[row.stage] = max(slowest.get(row.stage, 0.0), row.busy_s)
    return sum(slowest.values())


def _boundaries(machines: Sequence[Sequence[Measured]]) -> tuple[list[float], list[str]]:
    """Return the bytes per step between neighbours, both directions added up; nobody else may say much."""
    place = {row.rank: at for at, machine in enumerate(machines) for row in machine}
    between = [0.0] * (len(machines) - 1)
    past: dict[tuple[int, int], float] = {}
    for row in (row for machine in machines for row in machine):
        for peer, count in row.sent_bytes.items():
            low, high = sorted((place[row.rank], place[peer]))
            if high == low + 1:
                between[low] += count
            elif high != low:
                past[low, high] = past.get((low, high), 0.0) + count
    most = max(past.values(), default=0.0)
    if most > _NEGLIGIBLE * min(between):
        (low, high), count = max(past.items(), key=lambda item: item[1])
        first, second = (_list(row.rank for row in machines[at]) for at in (low, high))
        raise ValueError(
            f"this pipeline is no chain: ranks {first} and {second} are not on neighbouring machines and exchange "
            f"{count:.0f} bytes a step. Interleaved schedules do so, whose last rank sends to the first one again; "
            "with one stage per rank (GPipe, 1F1B), or with two machines, it is a chain"
        )
    return between, [f"{most:.0f} bytes a step between machines that are no neighbours were left out"] if most else []


def _interval(rows: Sequence[Measured], given: int | None) -> int:
    if given is not None and given < 1:
        raise ValueError(f"--checkpoint-every must be at least 1 step, got {given}")
    known = sorted({row.checkpoint_every for row in rows})
    if given is None and len(known) > 1:
        raise ValueError(f"the ranks take checkpoints every {_list(known)} steps: give one with --checkpoint-every")
    return given if given is not None else known[0]


def _bandwidth(run: Iterable[Event], machines: Sequence[Sequence[Measured]]) -> float:
    """Return the median of what was measured between machines: one number is wanted, and one link may be disturbed."""
    place = {row.rank: at for at, machine in enumerate(machines) for row in machine}
    rates = []
    for event in run:
        match event:
            case {"rank": int(rank), "peer": int(peer), "bytes_per_s": int(rate) | float(rate)}:
                if place.get(rank) != place.get(peer) and math.isfinite(rate) and rate > 0:
                    rates.append(float(rate))
    if not rates:
        raise ValueError("no bandwidth between machines was measured: give it with --bandwidth, like 10GB (a second)")
    return median(rates)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def read_events(directory: Path) -> list[Event]:
    """Return the events of a log directory, of which there must be some."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: give the log directory of a run")
    found = events.read(directory)
    if not found:
        raise ValueError(
            f"no events that can be read in {directory}: give the log directory of a run (regrow run --log-dir)"
        )
    return found


def print_profile(args: Any) -> int:
    """Carry out the command; return the exit code."""
    bandwidth = None if args.bandwidth is None else parse_bytes(args.bandwidth)
    if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(f"--bandwidth must be a positive number of bytes a second, got {args.bandwidth}")
    found = read_events(Path(args.directory))
    profile = make_profile(found, per=args.per, bandwidth=bandwidth, checkpoint_every=args.checkpoint_every)
    for note in profile.notes:
        print(f"regrow profile: {note}", file=sys.stderr)
    if args.output is None:
        print(profile.to_json())
        return 0
    try:
        Path(args.output).write_text(profile.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {args.output}: {error.strerror}") from None
    print(f"{len(profile.replay_s)} machines in {args.output}; next: regrow plan logging {args.output} --cap SIZE")
    return 0
