"""Choose, for what was lost, the source that brings the job back soonest. Pure: no clock, no sockets, no torch.

Each planner says what it could do from each source alone, and from the best of several together. All of that is priced
by what this run has measured (``prices``), and the least expected time wins among those that the user's rules allow:
until every rank has done again the last step that was done before the loss. Of two that cost the same, the one is
taken that leaves more of the job as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from regrow.errors import Unrecoverable
from regrow.ids import Step
from regrow.plan.actions import Plan
from regrow.plan.holdings import Holding
from regrow.plan.offers import Offer, Offers
from regrow.plan.partial import plan_partial
from regrow.plan.planner import replica_offers
from regrow.plan.policies import plan_checkfreq, plan_commit
from regrow.plan.prices import Prices, show_s
from regrow.plan.shards import shard_offers
from regrow.plan.stages import stage_offers
from regrow.plan.storage import plan_storage
from regrow.rules import Policy, Rules, Source

EXACT = Rules()
WORTH_OTHER_BITS = 10
"""So many steps' time must be saved by a result that is not the undisturbed run's, where something exact is left."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A source, or several that the lost ranks use beside each other, and what a recovery from there would cost."""

    sources: tuple[Source, ...]
    """Empty if nobody's state was lost."""
    plan: Plan | None
    """``None``: it is not there."""
    seconds: float
    """Expected; infinite if it is not there."""
    text: str
    """How that is made up, or why it is not there."""
    exact: bool = True
    """Whether the result is the undisturbed run's."""

    @property
    def name(self) -> str:
        """Return the names of its sources."""
        return "+".join(self.sources) if self.sources else "nothing lost"

    def line(self, *, taken: bool) -> str:
        """Say it in a line."""
        cost = "not there" if self.plan is None else show_s(self.seconds)
        return f"candidate {self.name:8} {cost}: {self.text}{'  <- taken' if taken else ''}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without the plan."""
        seconds = None if self.plan is None else self.seconds
        return {"sources": [*self.sources], "seconds": seconds, "text": self.text, "exact": self.exact}


def make_plan(holdings: Sequence[Holding], rules: Rules = EXACT) -> Plan:
    """Return the plan for these holdings, one per rank of the world.

    Raises:
        Unrecoverable: nothing that still exists, or that the rules allow, can bring the ranks together.
        ValueError: replicas do not train the same model, or some ranks named their stage and others did not.
    """
    match rules.policy:
        case Policy.CHECKFREQ | Policy.RESTART:  # those who are to start anew have nothing else to go on from either
            return plan_checkfreq(holdings)
        case Policy.COMMIT:
            return plan_commit(holdings)
        case Policy.LADDER:
            pass
    found, why = _weigh(holdings, rules)
    if all(candidate.plan is None for candidate in found):
        raise Unrecoverable(why)
    if not any(holding.fresh for holding in holdings):
        rules = replace(rules, force=None)  # there is nothing to take from anywhere
    taken = choose(found, rules, Prices(holdings).step_s.value)
    assert taken.plan is not None
    return replace(taken.plan, weighed=tuple(candidate.line(taken=candidate is taken) for candidate in found))


def candidates(holdings: Sequence[Holding], rules: Rules = EXACT) -> list[Candidate]:
    """Return all that this kind of job could be healed from, in the order of preference; what is not there as well."""
    return _weigh(holdings, rules)[0]


def choose(found: Sequence[Candidate], rules: Rules = EXACT, step_s: float = 0.0) -> Candidate:
    """Return the one with the least expected time that is allowed; older values only if that saves some steps' time.

    Raises:
        Unrecoverable: there is none.
    """
    able = [each for each in found if each.plan is not None and (each.exact or rules.approximate)]
    if rules.force is not None:
        able = [each for each in able if each.sources == (rules.force,)]
        if not able:
            whys = [each.text for each in found if each.sources == (rules.force,)]
            why = whys[0] if whys else "this kind of job has no such source"
            raise Unrecoverable(f"--force-source {rules.force} does not allow what is left: {why}")
    if not able:
        raise Unrecoverable("; ".join(each.text for each in found))
    penalty_s = WORTH_OTHER_BITS * step_s
    return min(able, key=lambda each: each.seconds + (0.0 if each.exact else penalty_s))


def _weigh(holdings: Sequence[Holding], rules: Rules) -> tuple[list[Candidate], str]:
    """Return the candidates, and why the lost state cannot be had but from storage, if that is so."""
    ranks = sorted(holdings, key=lambda holding: holding.rank)
    prices = Prices(ranks)
    try:
        offers, why = _offers(ranks, prices)
    except Unrecoverable as error:  # those that should be replicas of each other are not
        why = str(error)
        offers = [Offer(sources=(Source.REPLICA,), plan=None, why_not=why)]
    stored = plan_storage(ranks, why)
    missing = "" if stored is not None else "storage has no checkpoint of the job that every rank sees"
    every = [*offers, *_partial(ranks, rules, why), Offer(sources=(Source.DISK,), plan=stored, why_not=missing)]
    front = max(
        (
            *(holding.step for holding in ranks if holding.step is not None),
            *(offer.plan.step for offer in every if offer.plan is not None),
        ),
        default=Step(0),
    )
    return [_candidate(offer, prices, front) for offer in every], why


def _offers(ranks: Sequence[Holding], prices: Prices) -> Offers:
    if any(holding.place is not None for holding in ranks):
        return shard_offers(ranks, prices)
    if any(holding.stage is not None for holding in ranks):
        return stage_offers(ranks)
    return replica_offers(ranks)


def _partial(ranks: Sequence[Holding], rules: Rules, why: str) -> list[Offer]:
    """Return what can be done with older values, if that is allowed and something is lost."""
    if not rules.approximate or not (why or any(holding.fresh for holding in ranks)):
        return []
    plan = plan_partial(ranks, why or "what was lost comes back sooner with older values")
    missing = "" if plan is not None else "there are no running checkpoints of all that was lost, or no step for all"
    return [Offer(sources=(Source.PARTIAL,), plan=plan, why_not=missing)]


def _candidate(offer: Offer, prices: Prices, front: Step) -> Candidate:
    if offer.plan is None:
        return Candidate(sources=offer.sources, plan=None, seconds=math.inf, text=offer.why_not)
    seconds, text = prices.plan(offer.plan, front)
    exact = offer.plan.cost is None
    return Candidate(sources=offer.sources, plan=offer.plan, seconds=seconds, text=text, exact=exact)
