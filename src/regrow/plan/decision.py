"""What is recorded of a decision, so that it can be made again: by whom what was held, what was allowed, what was said.

Pure. Most of what ranks hold is alike: of each, only what differs from the first one is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrow.plan.actions import Plan
from regrow.plan.holdings import Holding
from regrow.plan.ladder import candidates
from regrow.rules import Rules


@dataclass(frozen=True)
class Decision:
    """The question, and the answer as it was given then."""

    holdings: tuple[Holding, ...]
    rules: Rules
    lines: tuple[str, ...]
    """Of the plan; none if there was no way to go on."""
    why_not: str
    """Why there was none."""


def to_json(holdings: Sequence[Holding], rules: Rules, plan: Plan | None, why_not: str = "") -> dict[str, Any]:
    """Return the fields of an event."""
    ranks = sorted(holdings, key=lambda holding: holding.rank)
    first, *rest = [holding.to_json() for holding in ranks]
    alike = [{key: value for key, value in row.items() if value != first[key]} for row in rest]
    return {
        "lines": [] if plan is None else plan.lines(),
        "why_not": why_not,
        "holdings": [first, *alike],
        "rules": rules.to_json(),
        "candidates": [each.to_json() for each in candidates(ranks, rules)],
    }


def from_json(value: Mapping[str, Any]) -> Decision:
    """Return what ``to_json`` was made of.

    Raises:
        ValueError: it is of a version that recorded something else.
    """
    try:
        first, *rest = value["holdings"]
        return Decision(
            holdings=tuple(Holding.from_json({**first, **row}) for row in ({}, *rest)),
            rules=Rules.from_json(value["rules"]),
            lines=tuple(value["lines"]),
            why_not=str(value["why_not"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"what was held then is not recorded as this version knows it ({error!r})") from None
