"""A way to heal that one of the planners offers, or why it cannot. Plain data; what it costs is for others to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.plan.actions import Plan
from regrow.rules import Source


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Where all lost ranks get their state from, and the best plan by which they do."""

    sources: tuple[Source, ...]
    """One; or several, where ranks get theirs from different ones. None if nobody's state was lost."""
    plan: Plan | None
    why_not: str = ""
    """Why there is no plan."""


Offers = tuple[Sequence[Offer], str]
"""All that a planner has to offer; and, if that is nothing, why the state cannot be had."""
