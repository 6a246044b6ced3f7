"""Choosing a recovery: holdings in, a plan with its reasons out. Pure."""

from regrow.plan.actions import Action, Copy, Load, Own, Plan, Replay, Restore, Settle, Undo
from regrow.plan.holdings import Holding
from regrow.plan.ranges import Indices
from regrow.plan.stages import make_plan

__all__ = [
    "Action",
    "Copy",
    "Holding",
    "Indices",
    "Load",
    "Own",
    "Plan",
    "Replay",
    "Restore",
    "Settle",
    "Undo",
    "make_plan",
]
