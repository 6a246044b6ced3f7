"""Choosing a recovery: holdings in, a plan with its reasons out. Pure."""

from regrow.plan.actions import Action, Copy, Own, Plan, Settle, Undo
from regrow.plan.holdings import Holding
from regrow.plan.planner import make_plan
from regrow.plan.ranges import Indices

__all__ = ["Action", "Copy", "Holding", "Indices", "Own", "Plan", "Settle", "Undo", "make_plan"]
