"""Choosing a recovery: holdings in, a plan with its reasons out. Pure."""

from regrow.plan.actions import Action, Copy, Keep, Load, Own, Patch, Plan, Replay, Restore, Settle, Undo
from regrow.plan.holdings import Holding
from regrow.plan.ladder import make_plan
from regrow.plan.ranges import Indices
from regrow.plan.running import Running

__all__ = [
    "Action",
    "Copy",
    "Holding",
    "Indices",
    "Keep",
    "Load",
    "Own",
    "Patch",
    "Plan",
    "Replay",
    "Restore",
    "Running",
    "Settle",
    "Undo",
    "make_plan",
]
