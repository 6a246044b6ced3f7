"""What other systems would do after a loss: everyone goes back to what was saved last. Pure.

For comparison with what the planner finds. Nothing that lives is used: neither replicas nor what a survivor still has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regrow.errors import StartOver, Unrecoverable
from regrow.plan.actions import Plan
from regrow.plan.holdings import Holding
from regrow.plan.prices import Prices
from regrow.plan.ranges import Indices
from regrow.plan.shards import plan_shards
from regrow.plan.storage import done_again, plan_storage


def plan_checkfreq(holdings: Sequence[Holding]) -> Plan:
    """Return the plan by which every rank loads the newest checkpoint on storage that all see (CheckFreq).

    Raises:
        StartOver: there is none yet.
    """
    plan = plan_storage(holdings, "the policy has everyone go back")
    if plan is None:
        raise StartOver("there is no checkpoint on storage yet that every rank sees")
    return plan


def plan_commit(holdings: Sequence[Holding]) -> Plan:
    """Return the plan by which every rank takes its copy of the last commit that all have (Elastic Horovod).

    Raises:
        Unrecoverable: somebody's copies are gone, and there is no checkpoint on storage.
    """
    try:
        # as if nobody lived: then copies are all there is
        alone = [replace(holding, step=None, updated=Indices(), own_steps=()) for holding in holdings]
        plan = plan_shards(alone, Prices(alone))
    except Unrecoverable:
        why = "there is no commit any more that every rank has a copy of"
        stored = plan_storage(holdings, why)
        if stored is None:
            raise Unrecoverable(f"{why}: the memory that held some is gone, or damaged") from None
        return stored
    furthest = max((holding.step for holding in holdings if holding.step is not None), default=plan.step)
    lost = done_again(furthest - plan.step)
    return replace(plan, reason=f"the policy has everyone go back: all take their copies of the last commit{lost}")
