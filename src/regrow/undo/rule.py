"""What a family of optimizers must say so that its step can be taken back.

A rule looks at numbers only: it never touches an optimizer, never allocates what it can be lent, and never decides
when a step is taken back. `Ledger` does that. Every family's module restates its forward step beside its inverse.

Names: the parameter is ``"param"`` (`PARAM`), a tensor of its state has the key that the optimizer uses
(``"exp_avg"``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

PARAM = "param"
"""The parameter itself, where tensors are named."""

DIVIDES = 2.0**-10
"""A factor smaller than this is not divided by: what it lost is kept instead.

(1/DIVIDES is how much a rounding error grows.)
"""


@dataclass(slots=True)
class Note:
    """What was noted of one parameter right before its update."""

    param: Tensor
    grad: Tensor
    hyper: Mapping[str, Any]
    """The options of its group as this step used them."""
    scalars: dict[str, float | Tensor]
    """One-element state as it was before the step (the step counter among it); empty before the first step."""
    had: frozenset[str]
    """Keys of its state that held a value before the step; empty before the first step."""
    kept: frozenset[str] = frozenset()
    """Tensors that were copied before the step.

    What `Rule.keep` named, and what the rule cannot work on (another type or size).
    """
    extra: dict[str, float] = field(default_factory=dict)
    """What `Rule.note` wants to remember."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Its state as the step left it."""

    def number(self, option: str) -> float:
        """Return an option of the group as a float; it may be a tensor there (``lr``)."""
        return float(self.hyper[option])

    def wanted(self, name: str) -> bool:
        """Say whether the inverse has to give this state tensor back: it existed, and no copy of it was kept."""
        return name in self.had and name not in self.kept

    def count(self) -> float:
        """Return the step counter as it stood after the update."""
        return float(self.scalars.get("step", 0.0)) + 1.0


@dataclass(slots=True)
class Slice:
    """A stretch of one parameter's tensors, all in the precision that the inverse works in.

    ``old`` is to be filled. It may be the same memory as ``new``: read a tensor of ``new`` before its ``old`` is
    written. What was kept (`Note.kept`) stands in ``old`` already and must not be written.
    """

    new: dict[str, Tensor]
    old: dict[str, Tensor]
    grad: Tensor
    spare: Sequence[Tensor]
    """`Rule.spares` tensors of the slice's length, contents arbitrary."""


class Rule(Protocol):
    """How one family's step is taken back."""

    elementwise: bool
    """True if an element of the old tensors depends on the same element of the new ones only.

    Then slices are short and stay in cache.
    """
    steps_elementwise: bool = False
    """True if the *step*, too, changes an element by itself, so that it may be taken in pieces of a tensor.

    (LAMB's does not: it scales by norms, which its inverse finds in the state.)
    """
    spares: int
    """How many spare tensors `invert` works with (elementwise rules only)."""

    def refuse(self, group: Mapping[str, Any]) -> str | None:
        """Return why the step of a parameter group cannot be taken back, with the remedy; None if it can."""

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the state tensors that the step changes (one-element ones are restored without the
        rule).
        """

    def keep(self, note: Note) -> tuple[str, ...]:
        """Return the tensors (`PARAM` or state) that no arithmetic brings back under these options: they are copied."""

    def note(self, note: Note) -> None:
        """Remember in ``note.extra`` a number that only the old values give (a norm)."""

    def prepare(self, note: Note) -> Any:
        """Return the coefficients of the inverse; called once per parameter, after the step."""

    def invert(self, k: Any, s: Slice) -> None:
        """Fill ``s.old`` with the values before the step."""


class Elementwise(Rule):
    """Defaults for the common case. Subclass it and give `tensors`, `keep`, `prepare`, `invert`."""

    elementwise: bool = True
    spares: int = 2
    keeps_by_options: bool = False
    """Whether `keep` looks at the group's options alone, so that one answer holds for all parameters of a group."""

    def refuse(self, group: Mapping[str, Any]) -> str | None:
        """Everything is invertible unless a family says otherwise."""
        return None

    def note(self, note: Note) -> None:
        """Nothing to remember."""
        return


def divides(factor: float) -> bool:
    """Say whether dividing by ``factor`` gives back what a multiplication by it took."""
    return abs(factor) >= DIVIDES


def step_gradient(s: Slice, *, maximize: bool, decay: float) -> Tensor:
    """Return the gradient as the step used it: negated, and with the coupled decay of the *old* parameter.

    Takes ``spare[0]``.
    """
    grad = s.grad
    if maximize:
        grad = torch.neg(grad, out=s.spare[0])
    if decay != 0:
        grad = torch.add(grad, s.old[PARAM], alpha=decay, out=s.spare[0])
    return grad


def unlerp(new: Tensor, grad: Tensor, weight: float, out: Tensor) -> None:
    """Take back ``m.lerp_(grad, weight)``: m = m' + w/(1 - w) (m' - grad), itself a lerp.

    Off by the rounding of m', so by many ulp where m is much smaller than the gradient.
    """
    torch.lerp(new, grad, 1 - 1 / (1 - weight), out=out)


def unaverage_square(new: Tensor, grad: Tensor, decay: float, out: Tensor) -> None:
    """Take back ``v.mul_(decay).addcmul_(grad, grad, value=1 - decay)``.

    Never below zero, so a later square root is a number.
    """
    torch.addcmul(new, grad, grad, value=-(1 - decay), out=out).div_(decay).clamp_min_(0)
