"""Everyone back to a checkpoint of the whole job: the last resort, unless it is the shortest way. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from regrow.ids import Step
from regrow.plan.actions import Action, Load, Own, Plan, Settle
from regrow.plan.holdings import Holding


def plan_storage(holdings: Sequence[Holding], why: str) -> Plan | None:
    """Return the plan by which all ranks take the newest checkpoint that everyone sees; ``None`` if there is none.

    ``why``: what has made it necessary; empty if nothing has.
    """
    ranks = sorted(holdings, key=lambda holding: holding.rank)
    common = set.intersection(*({*holding.disk} for holding in ranks))
    if not common:
        return None
    step = Step(max(common))
    actions: list[Action] = [Load(rank=holding.rank, step=step, whole=True) for holding in ranks]
    actions += [Settle(rank=holding.rank, step=step, own=Own.CHECKPOINT) for holding in ranks]
    furthest = max((holding.step for holding in ranks if holding.step is not None), default=None)
    lost = done_again(0 if furthest is None else furthest - step)
    return Plan(
        step=step,
        reason=f"{why}: all take the checkpoint on storage{lost}"
        if why
        else f"all take the checkpoint on storage{lost}",
        actions=tuple(actions),
        positions=(step,) * len(ranks) if ranks[0].stage is not None else (),
    )


def done_again(steps: int) -> str:
    """Return the end of a sentence: how many steps are lost, if any are."""
    return f"; {steps} step{'s are' if steps > 1 else ' is'} done again" if steps > 0 else ""
