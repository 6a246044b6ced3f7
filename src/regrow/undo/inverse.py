"""Run a rule over one parameter's tensors: to measure what its inverse loses, and to take the step back.

Both go through the same slices in the same way, so that the second gives the bits that the first compared with. Knows
nothing of optimizers and of when a step is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regrow.undo.layout import BITS, WORKING, Pool, chunk_elements, empty_like, flatten, plain
from regrow.undo.residual import Residual
from regrow.undo.rule import PARAM, Note, Rule, Slice


class Scratch:
    """Working memory that grows to what one slice needs and stays: one tensor per use."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def rows(self, use: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous rows x width tensor, contents arbitrary, valid until the same ``use`` is asked for
        again.
        """
        flat = self._flat.get((use, dtype, device))
        if flat is None or flat.numel() < rows * width:
            flat = self._flat[use, dtype, device] = torch.empty(rows * width, dtype=dtype, device=device)
        return flat.narrow(0, 0, rows * width).view(rows, width)

    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(flat.nbytes for flat in self._flat.values())


@dataclass(slots=True)
class Copies:
    """Copies of some tensors of one parameter as they were before the step, in memory lent by a `Pool`."""

    tensors: dict[str, Tensor]
    """By name, with the shape and strides of the originals."""
    memory: Tensor | None
    """All of them, one per row, where they are equally long."""

    @classmethod
    def of(cls, originals: Mapping[str, Tensor], pool: Pool) -> Copies:
        """Copy ``originals`` (plain tensors)."""
        if not originals:
            return cls({}, None)
        first = next(iter(originals.values()))
        if any(t.numel() != first.numel() or t.dtype != first.dtype for t in originals.values()):
            return cls(
                {name: empty_like(t, pool.take((t.numel(),), t, t.dtype)).copy_(t) for name, t in originals.items()},
                None,
            )
        memory = pool.take((len(originals), first.numel()), first, first.dtype)
        return cls(
            {name: empty_like(t, row).copy_(t) for row, (name, t) in zip(memory, originals.items(), strict=True)},
            memory,
        )

    def drop(self, pool: Pool) -> None:
        """Give the memory back."""
        if self.memory is not None:
            pool.give(self.memory)
        else:
            for tensor in self.tensors.values():
                pool.give(tensor.as_strided((tensor.numel(),), (1,)))
        self.tensors, self.memory = {}, None

    def rows(self, *, same_layout: bool) -> Tensor:
        """Return them one per row, in memory order if ``same_layout``, else in index order."""
        if same_layout and self.memory is not None:
            return self.memory
        return torch.stack([t.contiguous().view(-1) for t in self.tensors.values()])


@dataclass(slots=True)
class _Operands:
    new: dict[str, Tensor]
    grad: Tensor
    kept: dict[str, Tensor]
    copied: dict[str, Tensor] | None
    """None if all are views of the true tensors in memory order.

    Else the true tensors, of which ``new`` may be copies in index order.
    """


def rows_of(rule: Rule, note: Note) -> list[str]:
    """Return the names of what the inverse has to give back: what existed and was not kept."""
    rows = [PARAM] if PARAM not in note.kept else []
    return rows + [name for name in rule.tensors(note.hyper) if note.wanted(name)]


def _operands(rule: Rule, note: Note, kept: Copies, true: Copies | None) -> _Operands:
    new = {PARAM: plain(note.param)}
    new |= {name: plain(note.state[name]) for name in rule.tensors(note.hyper) if name in note.state}
    tensors = [*new.values(), plain(note.grad), *kept.tensors.values()]
    copied: dict[str, Tensor] | None = None
    if rule.elementwise:
        flat = flatten([*tensors, *(true.tensors.values() if true is not None else ())])
        if flat is None:
            flat = [t.contiguous().view(-1) for t in tensors]
            copied = new
        tensors = flat
    count = len(new)
    return _Operands(
        new=dict(zip(new, tensors[:count], strict=True)),
        grad=tensors[count],
        kept=dict(zip(kept.tensors, tensors[count + 1 :], strict=False)),
        copied=copied,
    )


def _slices(
    rule: Rule, ops: _Operands, rows: list[str], scratch: Scratch, threads: int, *, in_place: bool
) -> Iterator[tuple[int, int, Slice]]:
    """Yield (start, width, slice) over the operands.

    ``old`` is the operands' own memory, or scratch if not ``in_place`` or if narrower than what the rule works in.
    """
    param = ops.new[PARAM]
    device, working = param.device, WORKING.get(param.dtype, param.dtype)
    narrow = working != param.dtype
    if not rule.elementwise:
        new = {name: t.to(working) for name, t in ops.new.items()}
        old = dict(new) if in_place else {name: torch.empty_like(t) for name, t in new.items()}
        old |= {name: t.to(working) for name, t in ops.kept.items()}
        yield 0, param.numel(), Slice(new, old, ops.grad.to(working), ())
        return
    step = chunk_elements(param, threads)
    names = [*rows, *(name for name in ops.new if name not in rows)]
    # (only what is kept can be of another type than the parameter)
    pieces = {name: (ops.new[name] if narrow else ops.new[name].to(working)).split(step) for name in names}
    kept_pieces = {name: (t if narrow else t.to(working)).split(step) for name, t in ops.kept.items()}
    width = -1
    for index, grad in enumerate(ops.grad.split(step)):
        if grad.numel() != width:
            width = grad.numel()
            spare = scratch.rows("spare", rule.spares, width, working, device).unbind()
            wide = (
                scratch.rows("wide", len(names) + len(ops.kept) + 1, width, working, device).unbind() if narrow else ()
            )
            old_rows = () if in_place or narrow else scratch.rows("old", len(names), width, working, device).unbind()
        new = {name: pieces[name][index] for name in names}
        kept = {name: kept_pieces[name][index] for name in kept_pieces}
        if narrow:
            new = {name: row.copy_(new[name]) for row, name in zip(wide, names, strict=False)}
            kept = {name: row.copy_(kept[name]) for row, name in zip(wide[len(names) :], kept, strict=False)}
            grad = wide[-1].copy_(grad)
        old = dict(zip(names, old_rows, strict=True)) if old_rows else dict(new)
        old |= kept
        yield index * step, width, Slice(new, old, grad, spare)


def lost_bits(
    rule: Rule, note: Note, kept: Copies, true: Copies, pool: Pool, scratch: Scratch, threads: int
) -> list[Residual]:
    """Return what must be added to the inverse of the step just made to give ``true``, bit for bit. Changes nothing."""
    rows = rows_of(rule, note)
    if not rows or plain(note.param).numel() == 0:
        return []
    ops = _operands(rule, note, kept, true)
    k = rule.prepare(note)
    param = ops.new[PARAM]
    bits = BITS[param.dtype]
    if not rule.elementwise:
        residuals = []
        for _, _, s in _slices(rule, ops, rows, scratch, threads, in_place=False):
            rule.invert(k, s)
            for name in rows:
                computed = s.old[name].to(param.dtype).contiguous().view(1, -1).view(bits)
                difference = true.tensors[name].contiguous().view(1, -1).view(bits) - computed
                residuals.append(Residual(pool, 1, difference.numel(), difference))
                residuals[-1].put(0, difference, computed)
        return residuals
    residual = Residual(pool, len(rows), param.numel(), param)
    true_bits = true.rows(same_layout=ops.copied is None).view(bits)
    for start, width, s in _slices(rule, ops, rows, scratch, threads, in_place=False):
        rule.invert(k, s)
        if param.dtype in WORKING:
            computed = scratch.rows("rounded", len(rows), width, param.dtype, param.device)
            for row, name in zip(computed, rows, strict=True):
                row.copy_(s.old[name])
        else:
            computed = scratch.rows("old", len(s.new), width, param.dtype, param.device)[: len(rows)]
        difference = scratch.rows("difference", len(rows), width, bits, param.device)
        torch.sub(true_bits.narrow(1, start, width), computed.view(bits), out=difference)
        residual.put(start, difference, scratch.rows("shifted", len(rows), width, bits, param.device))
    return [residual]


def take_back(rule: Rule, note: Note, kept: Copies, residuals: list[Residual], scratch: Scratch, threads: int) -> None:
    """Put the old values into the parameter and its state tensors; with ``residuals`` they are the very bits."""
    rows = rows_of(rule, note)
    ops = _operands(rule, note, kept, None)
    if rows:
        k = rule.prepare(note)
        param = ops.new[PARAM]
        bits = BITS[param.dtype]
        for start, width, s in _slices(rule, ops, rows, scratch, threads, in_place=True):
            rule.invert(k, s)
            if not rule.elementwise:
                for index, name in enumerate(rows):
                    ops.new[name].copy_(s.old[name])
                    if residuals:
                        flat = ops.new[name].contiguous().view(1, -1)
                        flat.view(bits).add_(
                            residuals[index].get(0, torch.empty(flat.shape, dtype=bits, device=flat.device))
                        )
                        ops.new[name].copy_(flat.view(ops.new[name].shape))
                continue
            if param.dtype in WORKING:
                for name in rows:
                    ops.new[name].narrow(0, start, width).copy_(s.old[name])
            if residuals:
                difference = scratch.rows("difference", len(rows), width, bits, param.device)
                residuals[0].get(start, difference)
                for row, name in zip(difference, rows, strict=True):
                    ops.new[name].narrow(0, start, width).view(bits).add_(row)
    if ops.copied is not None:
        for name in rows:
            ops.copied[name].copy_(ops.new[name].view(ops.copied[name].shape))
    for name, copy in kept.tensors.items():
        plain(note.param if name == PARAM else note.state[name]).copy_(copy)
