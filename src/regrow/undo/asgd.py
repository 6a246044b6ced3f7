"""ASGD: SGD with a decaying rate and a running average of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unlerp

AVERAGE = "ax"


class _Coefficients(NamedTuple):
    eta: float
    mu: float
    shrink: float
    maximize: bool
    param: bool
    average: bool


def _eta_and_mu(note: Note) -> tuple[float, float]:
    """Return what this step used: the state's values before it, or those of a first step."""
    return float(note.scalars.get("eta", note.number("lr"))), float(note.scalars.get("mu", 1.0))


class ASGDRule(Elementwise):
    """Inverse of `torch.optim.ASGD`.

    Forward, with g negated if maximize, eta and mu the scalars that the step before left::

        g += wd p;  p' = p (1 - lambd eta) - eta g;  ax' = ax + mu (p' - ax);  eta', mu' from the count

    Exactness: p within a few ulp where the update is not larger than p; ax within a few ulp divided by 1 - mu; eta and
    mu exact.
    Kept: ax while mu is near 1 (it is then overwritten by p', which is so until step t0); p if eta (lambd + wd) is
    near 1.
    """

    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The average."""
        return (AVERAGE,)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        eta, mu = _eta_and_mu(note)
        shrink = 1 - eta * (note.number("lambd") + note.number("weight_decay"))
        wanted = ((PARAM, not divides(shrink)), (AVERAGE, not divides(1 - mu)))
        return tuple(name for name, keep in wanted if keep)

    def prepare(self, note: Note) -> _Coefficients:
        """Scalars of this step."""
        eta, mu = _eta_and_mu(note)
        return _Coefficients(
            eta=eta,
            mu=mu,
            shrink=1 - eta * (note.number("lambd") + note.number("weight_decay")),
            maximize=note.hyper["maximize"],
            param=PARAM not in note.kept,
            average=note.wanted(AVERAGE),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class. The average comes first: it needs p', which may be overwritten by p."""
        if k.average:
            unlerp(s.new[AVERAGE], s.new[PARAM], k.mu, s.old[AVERAGE])
        if k.param:
            grad = step_gradient(s, maximize=k.maximize, decay=0)
            torch.add(s.new[PARAM], grad, alpha=k.eta, out=s.old[PARAM]).div_(k.shrink)
