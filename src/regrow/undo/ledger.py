"""Keep what is needed to take back the step in progress of one optimizer, and take it back, parameter by parameter.

The ledger never runs a step, never decides that one is taken back, and does no locking: its owner serialises the
calls. It reads the optimizer's ``param_groups`` and ``state`` and, in `Ledger.undo` only, writes parameters and state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regrow.errors import UndoUnsupported
from regrow.undo.inverse import Copies, Scratch, lost_bits, rows_of, take_back
from regrow.undo.layout import WORKING, Pool, plain
from regrow.undo.registry import check_supported, rule_for
from regrow.undo.residual import Residual
from regrow.undo.rule import PARAM, Elementwise, Note
from regrow.undo.sparse import Touched


class _Phase(Enum):
    NOTED = "noted"
    UPDATED = "updated"
    REPEATED = "repeated"
    TAKEN_BACK = "taken back"


@dataclass(slots=True)
class _Entry:
    note: Note
    before: dict[str, Any] | None
    """Its state dict (the same tensors, not copies) before the step; None if it had none."""
    kept: Copies
    true: Copies | None
    """What the tensors were: between `before` and `after` in exact mode."""
    touched: Touched | None
    exact: bool
    threads: int
    phase: _Phase = _Phase.NOTED
    residuals: list[Residual] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    finite: bool = False
    """Whether the tensors were found finite after the step; asked only where it matters, and once."""


@dataclass(slots=True)
class _Glance:
    """A parameter of which nothing had to be copied: an entry is made of it only if one is asked for.

    The step of nearly every run without failures is of this kind, so this is all that it costs.
    """

    param: Tensor
    grad: Tensor
    hyper: Mapping[str, Any]
    before: dict[str, Any] | None
    scalars: dict[str, float | Tensor]
    threads: int
    versions: dict[str, int] | None = None
    """None until the update is done."""


class Ledger:
    """What is needed to take back the step in progress of one optimizer, parameter by parameter.

    ``exact`` keeps the bits that the inverse loses, until `clear`. It may be switched between steps.
    """

    def __init__(self, optimizer: Optimizer, *, exact: bool = True) -> None:
        check_supported(optimizer)
        self.exact = exact
        self._optimizer = optimizer
        self._rule = rule_for(optimizer)
        self._entries: dict[int, _Entry] = {}
        self._glances: dict[int, _Glance] = {}
        rule = self._rule
        self._glancing = isinstance(rule, Elementwise) and rule.keeps_by_options and type(rule).note is Elementwise.note
        self._groups: dict[int, dict[str, Any]] = {}
        self._signature: tuple[tuple[int, int], ...] = ()
        self._pool = Pool()
        self._scratch = Scratch()

    @torch.no_grad()
    def before(self, params: Sequence[Tensor] | None = None, grads: Sequence[Tensor] | None = None) -> None:
        """Note these parameters right before their update; None: all that have a gradient.

        The gradients are the parameters' own unless given; parameters without one are left out.
        """
        groups = self._group_of()
        if params is None:
            params = [param for group in self._optimizer.param_groups for param in group["params"]]
        overflow = self._overflow()
        glancing = self._glancing and not self.exact and not overflow
        threads = torch.get_num_threads()
        hypers: dict[int, tuple[Mapping[str, Any], tuple[str, ...], bool]] = {}
        for number, param in enumerate(params):
            grad = param.grad if grads is None else grads[number]
            if grad is None:
                continue
            key = id(param)
            if key in self._glances:
                self._full(key)
            entry = self._entries.get(key)
            if entry is not None and entry.phase in (_Phase.UPDATED, _Phase.REPEATED):
                entry.phase = _Phase.REPEATED
                continue
            group = groups.get(key)
            if group is None:
                self._signature = ()
                group = self._group_of().get(key)
            if group is None:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is in no group of this optimizer")
            known = hypers.get(id(group))
            if known is None:
                known = hypers[id(group)] = self._options_of(group, param, grad)
            hyper, tensors, keeps = known
            if entry is not None:
                self._drop(entry)
                del self._entries[key]
            if not (glancing and not keeps and self._glance(param, grad, hyper, tensors, threads)):
                self._entries[key] = self._noted(param, grad, hyper, overflow, threads)

    @torch.no_grad()
    def after(self, params: Sequence[Tensor] | None = None) -> None:
        """Complete the notes right after the update of these parameters; None: of all that `before` noted."""
        keys = None if params is None else [id(param) for param in params]
        state = self._optimizer.state
        glances = self._glances.values() if keys is None else map(self._glances.get, keys)
        for glance in glances:
            if glance is not None and glance.versions is None:
                glance.versions = _versions(glance.param, glance.grad, state.get(glance.param) or {})
        entries = list(self._entries.values()) if keys is None else map(self._entries.get, keys)
        for entry in entries:
            if entry is None or entry.phase is not _Phase.NOTED:
                continue
            note = entry.note
            note.state = state.get(note.param) or {}
            if entry.true is not None:
                entry.residuals = lost_bits(
                    self._rule, note, entry.kept, entry.true, self._pool, self._scratch, entry.threads
                )
                entry.true.drop(self._pool)
                entry.true = None
            entry.versions = _versions(note.param, note.grad, note.state)
            entry.phase = _Phase.UPDATED

    @torch.no_grad()
    def undo(self, params: Sequence[Tensor]) -> None:
        """Make these parameters and their state what they were at `before`: exactly in exact mode, else nearly.

        Raises `UndoUnsupported` before anything is changed if one of them cannot be taken back.
        """
        for param in params:
            reason = self.why_not(param)
            if reason is not None:
                raise UndoUnsupported(
                    f"the update of a parameter of shape {tuple(param.shape)} cannot be taken back: {reason}"
                )
        for param in params:
            entry = self._entries[id(param)]
            self._take_back(entry)
            self._drop(entry)
            entry.phase = _Phase.TAKEN_BACK

    def can_undo(self, param: Tensor) -> bool:
        """Say whether `undo` would take this parameter's update back."""
        return self.why_not(param) is None

    @torch.no_grad()
    def why_not(self, param: Tensor) -> str | None:
        """Return why this parameter's update cannot be taken back; None if it can."""
        entry = self._full(id(param))
        if entry is None:
            return "it was not updated in this step"
        note = entry.note
        match entry.phase:
            case _Phase.REPEATED:
                return "it was updated more than once in this step"
            case _Phase.TAKEN_BACK:
                return "its update was taken back already"
            case _Phase.NOTED:
                if entry.true is not None or entry.touched is not None:
                    return None
                return "its update was begun and not completed (after() was not called)"
            case _Phase.UPDATED:
                pass
        for name, version in _versions(note.param, note.grad, note.state).items():
            if version != entry.versions[name]:
                if name == "grad":
                    return "its gradient was overwritten in place since (use zero_grad(set_to_none=True))"
                return f"its {name} was changed since its update"
        if not entry.exact and not entry.finite and entry.touched is None and rows_of(self._rule, note):
            # a gradient that is not finite makes one of these so
            tensors = {PARAM: note.param}
            tensors |= {name: note.state[name] for name in self._rule.tensors(note.hyper) if name in note.state}
            for name, tensor in tensors.items():
                if not _finite(plain(tensor)):
                    return f"its {name} is not finite after the step, which no arithmetic takes back (use exact=True)"
            entry.finite = True
        return None

    def clear(self) -> None:
        """Drop everything: the step is complete, nothing of it will be taken back."""
        for entry in self._entries.values():
            self._drop(entry)
        self._entries.clear()
        self._glances.clear()

    def nbytes(self) -> int:
        """Return the bytes held now for the step in progress, gradients (held by reference) left out."""
        listed = sum(residual.listed_bytes() for entry in self._entries.values() for residual in entry.residuals)
        touched = sum(entry.touched.nbytes() for entry in self._entries.values() if entry.touched is not None)
        return self._pool.lent_bytes + listed + touched

    def idle_nbytes(self) -> int:
        """Return the bytes of working memory held for reuse, over steps too (at most 256 MB and a few slices)."""
        return self._pool.idle_bytes + self._scratch.nbytes()

    def _group_of(self) -> dict[int, dict[str, Any]]:
        groups = self._optimizer.param_groups
        signature = tuple((id(group), len(group["params"])) for group in groups)
        if signature != self._signature:
            self._groups = {id(param): group for group in groups for param in group["params"]}
            self._signature = signature
        return self._groups

    def _overflow(self) -> bool:
        # a fused step under a GradScaler does nothing if it found an overflow, or half of it: then everything is copied
        found_inf = getattr(self._optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _options_of(
        self, group: dict[str, Any], param: Tensor, grad: Tensor
    ) -> tuple[Mapping[str, Any], tuple[str, ...], bool]:
        """Return a group's options as they are now, the tensors that its step changes, and if any of them is kept."""
        hyper = _options(group)
        keeps = bool(self._rule.keep(Note(param, grad, hyper, {}, frozenset()))) if self._glancing else True
        return hyper, self._rule.tensors(hyper), keeps

    def _glance(
        self, param: Tensor, grad: Tensor, hyper: Mapping[str, Any], tensors: tuple[str, ...], threads: int
    ) -> bool:
        """Note a parameter in passing, unless something of it has to be copied."""
        if grad.is_sparse:
            return False
        state = self._optimizer.state.get(param)
        scalars: dict[str, float | Tensor] = {}
        before = None
        if state is not None:
            before = dict(state)
            dtype = param.dtype
            for name, value in before.items():
                if name not in tensors:
                    _add_scalar(scalars, name, value)
                elif value is not None and value.dtype != dtype:
                    return False
        self._glances[id(param)] = _Glance(param, grad, hyper, before, scalars, threads)
        return True

    def _full(self, key: int) -> _Entry | None:
        """Return the entry of a parameter, made of what was noted in passing if need be."""
        glance = self._glances.pop(key, None)
        if glance is None:
            return self._entries.get(key)
        had = frozenset(name for name, value in (glance.before or {}).items() if value is not None)
        note = Note(glance.param, glance.grad, glance.hyper, glance.scalars, had)
        entry = _Entry(note, glance.before, Copies({}, None), None, None, False, glance.threads)
        if glance.versions is not None:
            note.state = self._optimizer.state.get(glance.param) or {}
            entry.versions = glance.versions
            entry.phase = _Phase.UPDATED
        self._entries[key] = entry
        return entry

    def _noted(self, param: Tensor, grad: Tensor, hyper: Mapping[str, Any], overflow: bool, threads: int) -> _Entry:
        rule = self._rule
        state = self._optimizer.state.get(param)
        before = None if state is None else dict(state)
        tensors = rule.tensors(hyper)
        scalars: dict[str, float | Tensor] = {}
        had = set()
        for name, value in before.items() if before else ():
            if value is None:
                continue
            had.add(name)
            if name not in tensors:
                _add_scalar(scalars, name, value)
        note = Note(param=param, grad=grad, hyper=hyper, scalars=scalars, had=frozenset(had))
        entry = _Entry(note, before, Copies({}, None), None, None, self.exact, threads)
        present: dict[str, Tensor] = {name: before[name] for name in tensors if name in had} if before else {}
        present[PARAM] = param
        if grad.is_sparse:
            whole = not rule.elementwise or note.hyper.get("momentum", 0) != 0
            entry.touched = Touched(grad, {name: plain(t) for name, t in present.items()}, whole=whole)
            return entry
        kept = set(present) if overflow else {name for name in rule.keep(note) if name in present}
        if rule.elementwise:
            kept |= {name for name, t in present.items() if t.dtype != param.dtype}
        note.kept = frozenset(kept)
        rule.note(note)
        if kept:
            entry.kept = Copies.of({name: plain(t) for name, t in present.items() if name in kept}, self._pool)
        if self.exact:
            entry.true = Copies.of({name: plain(present[name]) for name in rows_of(rule, note)}, self._pool)
        return entry

    def _take_back(self, entry: _Entry) -> None:
        note, state = entry.note, self._optimizer.state
        if entry.touched is not None:
            entry.touched.put_back()
        elif entry.phase is _Phase.NOTED:
            # between before() and after(): whether the update ran or not, the copies are what it was
            assert entry.true is not None
            for name, copy in (entry.true.tensors | entry.kept.tensors).items():
                plain(note.param if name == PARAM else state[note.param][name]).copy_(copy)
        else:
            with _threads(entry.threads if entry.residuals else torch.get_num_threads()):
                take_back(self._rule, note, entry.kept, entry.residuals, self._scratch, entry.threads)
        if entry.before is None:
            state.pop(note.param, None)
            return
        for name, value in note.scalars.items():
            if isinstance(entry.before[name], Tensor):
                entry.before[name].copy_(value) if isinstance(value, Tensor) else entry.before[name].fill_(value)
        now = state[note.param]
        now.clear()
        now.update(entry.before)

    def _drop(self, entry: _Entry) -> None:
        entry.kept.drop(self._pool)
        if entry.true is not None:
            entry.true.drop(self._pool)
            entry.true = None
        for residual in entry.residuals:
            residual.drop(self._pool)
        entry.residuals = []
        entry.touched = None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as they are now; a tensor among them is copied, since a scheduler writes into it."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _add_scalar(scalars: dict[str, float | Tensor], name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        # a number is quicker than a copy, but on a device it would be waited for
        scalars[name] = value.item() if value.is_cpu and value.dim() == 0 else value.clone()
    elif isinstance(value, int | float):
        scalars[name] = value


def _versions(param: Tensor, grad: Tensor, state: Mapping[str, Any]) -> dict[str, int]:
    versions = {"grad": grad._version, PARAM: param._version}
    for name, value in state.items():
        if isinstance(value, Tensor):
            versions[name] = value._version
    return versions


def _finite(tensor: Tensor) -> bool:
    # a sum is finite only if all its terms are, and takes a fortieth of the time; it may also overflow, so ask then
    return bool(tensor.sum(dtype=torch.float32 if tensor.dtype in WORKING else None).isfinite()) or bool(
        tensor.isfinite().all()
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    # where a tensor is split among threads its ends are computed one by one, which may round differently
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
