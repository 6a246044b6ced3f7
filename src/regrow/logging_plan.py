"""``regrow plan logging``: which machines of a pipeline to take as one failure domain, so that journals fit a cap.

Reads a profile, prints the best grouping beside the paper's greedy one and the whole frontier, and draws it if asked.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from regrow.plan.grouping import Chain, Grouping, best, frontier, greedy
from regrow.sizes import parse_bytes, show_bytes

_FIELDS = {"replay_s", "boundary_bytes", "bandwidth", "checkpoint_every", "ranks_per_machine"}
_ROWS = 24
_MOST = 10**12


def read_profile(path: Path) -> tuple[Chain, int]:
    """Return the pipeline that a profile describes, and how many ranks each machine has."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    if not isinstance(profile, dict):
        raise ValueError(f"{path} must hold an object with {', '.join(sorted(_FIELDS))}")
    unknown, missing = set(profile) - _FIELDS, _FIELDS - {"ranks_per_machine"} - set(profile)
    if unknown or missing:
        wrong = [f"{name} is missing" for name in sorted(missing)] + [f"{name} is unknown" for name in sorted(unknown)]
        raise ValueError(f"{path}: {', '.join(wrong)}")
    try:
        chain = Chain(
            replay_s=_numbers("replay_s", profile["replay_s"]),
            boundary_bytes=_numbers("boundary_bytes", profile["boundary_bytes"]),
            bandwidth=_number("bandwidth", profile["bandwidth"]),
            interval=_whole("checkpoint_every", profile["checkpoint_every"]),
        )
        return chain, _whole("ranks_per_machine", profile.get("ranks_per_machine", 1))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):  # a string has elements, too
        raise ValueError(f"{name} must be a list of numbers, not {reprlib.repr(value)}")
    return tuple(_number(name, each) for each in value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from None


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not (number.is_integer() and 1 <= number <= _MOST):
        raise ValueError(f"{name} must be a whole number from 1 to {_MOST}, not {reprlib.repr(value)}")
    return int(number)


def domain_flag(grouping: Grouping, ranks_per_machine: int) -> str:
    """Return the flag of ``regrow run`` that makes these groups the failure domains."""
    spans = [(g.start * ranks_per_machine, g.stop * ranks_per_machine - 1) for g in grouping.groups]
    return "--failure-domain " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def render(chain: Chain, cap_bytes: float, ranks_per_machine: int) -> str:
    """Return the plan as a person reads it."""
    exact, theirs = best(chain, cap_bytes), greedy(chain, cap_bytes)
    points = frontier(chain)
    lines = [
        f"{chain.machines} machines, a checkpoint every {chain.interval} steps, "
        f"journals of at most {show_bytes(cap_bytes)}",
        "",
        f"best     {_row(exact)}",
        f"greedy   {_row(theirs)}",
        "",
        domain_flag(exact, ranks_per_machine),
        "",
        "the frontier: no grouping is better in both",
        f"  {'journals':>12}  {'expected':>12}  groups",
    ]
    lines += [f"  {_row(point)}" for point in _some(points)]
    if len(points) > _ROWS:
        lines.append(f"  ({len(points)} points, {_ROWS} of them shown)")
    return "\n".join(lines)


def _some(points: list[Grouping]) -> list[Grouping]:
    if len(points) <= _ROWS:
        return points
    return [points[round(number * (len(points) - 1) / (_ROWS - 1))] for number in range(_ROWS)]


def _row(grouping: Grouping) -> str:
    text = str(grouping)
    groups = text if len(text) <= 60 else f"{len(grouping.groups)} groups, {text[:40]} ..."
    return f"{show_bytes(grouping.storage_bytes):>12}  {grouping.expected_s:10.3f} s  {groups}"


def draw(chain: Chain, cap_bytes: float, path: Path) -> None:
    """Draw the frontier as a picture; needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = frontier(chain)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.step(
        [point.storage_bytes / 1e9 for point in points],
        [point.expected_s for point in points],
        where="post",
        color="0.5",
        label="frontier",
    )
    for name, mark, grouping in (
        ("best under the cap", "o", best(chain, cap_bytes)),
        ("greedy", "x", greedy(chain, cap_bytes)),
    ):
        axes.plot(grouping.storage_bytes / 1e9, grouping.expected_s, mark, label=f"{name}: {grouping.expected_s:.2f} s")
    axes.axvline(cap_bytes / 1e9, linestyle=":", color="0.3", label="cap")
    axes.set(xlabel="journals (GB)", ylabel="expected recovery (s)", title=f"{chain.machines} machines")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plan_logging(args: Any) -> int:
    """Carry out the command; return the exit code."""
    chain, ranks = read_profile(Path(args.profile))
    cap = parse_bytes(args.cap)
    print(render(chain, cap, ranks))
    if args.plot is not None:
        draw(chain, cap, Path(args.plot))
        print(f"drawn to {args.plot}")
    return 0
