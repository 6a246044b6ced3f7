"""Which rule takes back which optimizer, and why some have none.

Decided before any failure, by name: a step that cannot be taken back must not be found out when it has to be.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

from regrow.errors import UndoUnsupported
from regrow.optim import LAMB, Lion
from regrow.undo.adadelta import AdadeltaRule
from regrow.undo.adafactor import AdafactorRule
from regrow.undo.adagrad import AdagradRule
from regrow.undo.adam import AdamRule
from regrow.undo.adamax import AdamaxRule
from regrow.undo.asgd import ASGDRule
from regrow.undo.lamb import LAMBRule
from regrow.undo.layout import BITS
from regrow.undo.lion import LionRule
from regrow.undo.muon import MuonRule
from regrow.undo.nadam import NAdamRule
from regrow.undo.radam import RAdamRule
from regrow.undo.rmsprop import RMSpropRule
from regrow.undo.rprop import RpropRule
from regrow.undo.rule import Rule
from regrow.undo.sgd import SGDRule
from regrow.undo.sparse_adam import SparseAdamRule

_RULES: dict[type[Optimizer], Rule] = {
    torch.optim.Adadelta: AdadeltaRule(),
    torch.optim.Adafactor: AdafactorRule(),
    torch.optim.Adagrad: AdagradRule(),
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(),
    torch.optim.Adamax: AdamaxRule(),
    torch.optim.ASGD: ASGDRule(),
    torch.optim.Muon: MuonRule(),
    torch.optim.NAdam: NAdamRule(),
    torch.optim.RAdam: RAdamRule(),
    torch.optim.RMSprop: RMSpropRule(),
    torch.optim.Rprop: RpropRule(),
    torch.optim.SGD: SGDRule(),
    torch.optim.SparseAdam: SparseAdamRule(),
    LAMB: LAMBRule(),
    Lion: LionRule(),
}

_REGISTER = (
    "register a rule for it with regrow.undo.register(optimizer_cls, rule), "
    "or update only once every rank has its gradients"
)


def register(optimizer_cls: type[Optimizer], rule: Rule) -> None:
    """Say how the step of ``optimizer_cls`` is taken back.

    Its subclasses are covered if they leave ``step`` as it is.
    """
    _RULES[optimizer_cls] = rule


def _same_step(cls: type[Optimizer], base: type[Optimizer]) -> bool:
    # torch wraps `step` on the class when the first instance is made: compare what is inside
    same = inspect.unwrap(cls.step) is inspect.unwrap(base.step)
    return same and getattr(cls, "_init_group", None) is getattr(base, "_init_group", None)


def rule_for(optimizer: Optimizer) -> Rule:
    """Return the rule of an optimizer's class; `UndoUnsupported` names the class and the remedy."""
    cls = type(optimizer)
    for base in cls.__mro__:
        rule = _RULES.get(base)
        if rule is None:
            continue
        if _same_step(cls, base):
            return rule
        raise UndoUnsupported(
            f"{cls.__name__} changes the step of {base.__name__}, so its step cannot be taken back: {_REGISTER}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UndoUnsupported(
            "LBFGS evaluates the model several times in one step and keeps a history of directions: "
            "its step cannot be taken back. Use another optimizer, or let a failure go back to a checkpoint"
        )
    raise UndoUnsupported(f"the step of {cls.__name__} cannot be taken back: {_REGISTER}")


def check_supported(optimizer: Optimizer) -> None:
    """Raise `UndoUnsupported`, naming optimizer, option and value, and the remedy, if a step of this optimizer cannot
    be taken back.
    """
    name = type(optimizer).__name__
    rule = rule_for(optimizer)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UndoUnsupported(f"{name}(differentiable=True): its step is part of a graph. Use differentiable=False")
        reason = rule.refuse(group)
        if reason is not None:
            raise UndoUnsupported(f"{name}: {reason}")
        for param in group["params"]:
            dtype = torch.empty(0, dtype=param.dtype).real.dtype if param.is_complex() else param.dtype
            if dtype not in BITS or param.layout != torch.strided:
                raise UndoUnsupported(
                    f"{name} with a parameter of type {param.dtype}, layout {param.layout}: only dense "
                    f"{', '.join(str(d).removeprefix('torch.') for d in BITS)} and complex ones can be taken back"
                )
            if not rule.elementwise and hasattr(param, "to_local"):
                raise UndoUnsupported(
                    f"{name} with a sharded parameter (DTensor): its step uses norms over the whole parameter. "
                    "Use an elementwise optimizer (AdamW, SGD, ...), or do not shard"
                )
