"""Make past decisions again, from what a run has recorded of them, and answer what would have been otherwise.

Reads events and nothing else; the planner is the one that heals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from regrow import events
from regrow.errors import Unrecoverable
from regrow.plan import decision, make_plan
from regrow.plan.ladder import candidates
from regrow.rules import Rules, Source

Event = dict[str, Any]


def print_decisions(args: argparse.Namespace) -> int:
    """Print the decisions of a run; return the exit code."""
    found = decisions(events.read(Path(args.events)), args.generation)
    if not found:
        which = "" if args.generation is None else f" for generation {args.generation}"
        print(f"regrow explain: error: no plan{which} in {args.events} (give a run's log directory)", file=sys.stderr)
        return 1
    force = None if args.force is None else Source(args.force)
    print("\n\n".join(explain(event, force) for event in found))
    return 0


def decisions(run: Iterable[Event], generation: int | None = None) -> list[Event]:
    """Return the events that tell of a decision, all or those of one generation."""
    told = [event for event in run if event["event"] in ("plan", "no_plan")]
    return [event for event in told if generation is None or event.get("generation") == generation]


def explain(event: Event, force: Source | None = None) -> str:
    """Say what was decided and from what; with ``force``, what would have been with that."""
    title = f"generation {event.get('generation', '?')}"
    try:
        then = decision.from_json(event)
    except ValueError as error:
        return f"{title}: cannot be told: {error}"
    rules = then.rules if force is None else replace(then.rules, force=force)
    try:
        lines, why_not = make_plan(then.holdings, rules).lines(), ""
    except (Unrecoverable, ValueError) as error:
        lines = [each.line(taken=False) for each in candidates(then.holdings, rules)]
        why_not = str(error)
        lines.append(f"there is no way to go on: {why_not}")
    same = (then.why_not, then.lines) == (why_not, tuple(lines) if not why_not else ())
    return "\n".join([f"{title}: {_verdict(then, rules, force, same=same)}", *(f"  {line}" for line in lines)])


def _verdict(then: decision.Decision, rules: Rules, force: Source | None, *, same: bool) -> str:
    if force is not None:
        return f"with --force-source {force}"
    said = f" (--force-source {rules.force})" if rules.force is not None else ""
    if same:
        return f"decided as then{said}"
    head = then.lines[0] if then.lines else f"there was no way to go on: {then.why_not}"
    return f"decided otherwise than then{said}; then: {head}"
