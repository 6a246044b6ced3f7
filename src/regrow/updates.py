"""Knows which parameters the current step has updated, and can take those updates back.

Attached to optimizers through their public step hooks. With wait-free updates the parameters of a bucket are updated
in a thread of the group, as soon as the bucket's gradient has been reduced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from regrow import pieces, testing
from regrow.ddp import Bucket, after_backward
from regrow.ids import Step
from regrow.plan import Indices
from regrow.state.registry import Param, Registry
from regrow.undo import Ledger, rule_for


class Updates:
    """The updates of the step in progress. Written by the main thread and, wait-free, by the group's threads."""

    def __init__(self, registry: Registry, *, exact: bool, undo: bool = True) -> None:
        """``undo=False``: nothing is noted, since interrupted updates are not taken back but overwritten."""
        self._registry = registry
        self._exact = exact
        self._undo = undo
        self._lock = threading.RLock()
        self._updated: set[int] = set()
        self._stopped = False
        self._step = Step(0)
        self._attempt = 0
        """Counts the starts of steps: an update that was due in an earlier one comes too late, and is dropped."""
        self._ledgers = {id(opt): Ledger(opt, exact=False) for opt in registry.optimizers.values()} if undo else {}
        self._early: set[int] = set()
        """Parameters that were updated wait-free in this step: the user's ``optimizer.step()`` passes them over."""
        self._exactly: set[int] = set()
        """Those of the updated for which the very bits are kept."""
        self._due: set[int] = set()
        """Parameters of which a wait-free update is due or done in this step; the main thread's, unlike `_early`."""
        self._pending: list[torch.futures.Future[None]] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._versions: dict[int, int] = {}
        self.before_update: Callable[[], None] = lambda: None
        """Called before each update by the user's ``optimizer.step()``."""
        self.before_early_update: Callable[[], None] = lambda: None
        """Called, wait-free, before the first reduction after which parameters are updated."""
        for optimizer in registry.optimizers.values():
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    # the step's life -----------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """A step starts (again)."""
        with self._lock:
            self._step = step
            self._stopped = False
            self._attempt += 1
            self._clear()

    def complete(self) -> None:
        """The step is done: nothing of it will be taken back."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._updated.clear()
        self._exactly.clear()
        self._early.clear()
        self._hidden.clear()
        self._due.clear()
        self._pending.clear()
        self._versions.clear()
        for ledger in self._ledgers.values():
            ledger.clear()

    @property
    def begun(self) -> bool:
        """Whether this step has updated anything yet."""
        return bool(self._updated)

    def expect_failures_after_update(self) -> None:
        """Keep exact records from the next step on: a collective follows the update, so undo may be needed.

        A step whose last collective comes before its update is never interrupted after it, and keeps no records.
        """
        if self._exact:
            for ledger in self._ledgers.values():
                ledger.exact = True

    def stop(self) -> None:
        """Let a running update finish and start no other: the step was interrupted."""
        with self._lock:
            self._stopped = True

    # what is held, and how to go back --------------------------------------------------------------------------------

    def updated(self) -> Indices:
        """Return the parameters at the next step's version."""
        return Indices.of(self._updated)

    def undoable(self) -> tuple[Indices, bool, str]:
        """Return which of the updated can be taken back, whether exactly, and why not the others."""
        able, exact, why = [], True, ""
        if not self._undo:
            return Indices(), exact, "updates are not taken back here, but overwritten"
        for index in self._updated:
            param = self._registry.params[index]
            ledger = self._ledger(param)
            reason = ledger.why_not(param.tensor)
            if reason is None:
                able.append(index)
                exact = exact and index in self._exactly
            else:
                why = f"{param.name}: {reason}"
        return Indices.of(able), exact, why

    def undo(self, indices: Indices) -> None:
        """Take back the update of these parameters."""
        by_optimizer: dict[int, list[torch.Tensor]] = {}
        for index in indices:
            param = self._registry.params[index]
            by_optimizer.setdefault(id(param.optimizer), []).append(param.tensor)
        for key, tensors in by_optimizer.items():
            self._ledgers[key].undo(tensors)
        self.forget(indices)

    def forget(self, indices: Indices) -> None:
        """These parameters are back at the step's start, by undo or by a copy."""
        self._updated.difference_update(indices)

    def _mark(self, params: Iterable[Param]) -> None:
        for param in params:
            self._updated.add(param.index)
            if self._undo and self._ledger(param).exact:
                self._exactly.add(param.index)

    def _ledger(self, param: Param) -> Ledger:
        return self._ledgers[id(param.optimizer)]

    # optimizer.step() called by the user -----------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.before_update()
        with self._lock:
            self._hide_early(optimizer)
            if self._undo:
                self._ledgers[id(optimizer)].before()
            else:
                self._mark(self._registry.of_optimizer(optimizer))  # whatever comes of it, the old values are gone

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self._lock:
            if self._undo:
                self._ledgers[id(optimizer)].after()
            self._mark(param for param in self._registry.of_optimizer(optimizer) if param.tensor.grad is not None)
            for tensor, grad in self._hidden:
                tensor.grad = grad
            self._hidden.clear()
        testing.point("after_update", self._step)

    def _hide_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Take away the gradients of parameters that were updated during backward, so that they are skipped."""
        for param in self._registry.of_optimizer(optimizer):
            if param.index not in self._early:
                continue
            grad = param.tensor.grad
            if grad is not None and self._versions.get(param.index, grad._version) != grad._version:
                raise ValueError(
                    f"the gradient of {param.name} was changed after backward (clipping? unscaling?), but wait-free "
                    "updates have used it already: call protect(wait_free=False)"
                )
            self._hidden.append((param.tensor, grad))
            param.tensor.grad = None

    # wait-free: a listener to the reductions of DDP's buckets --------------------------------------------------------

    def expect_early_updates(self) -> None:
        """Keep exact records of every update: each may have to be taken back."""
        if self._exact:
            for ledger in self._ledgers.values():
                ledger.exact = True

    def reducing(self, bucket: Bucket) -> None:
        """A bucket's reduction is about to be issued."""
        if not self._due:
            self.before_early_update()
        if bucket.index > 0:
            self._between_updates()
        for tensor in bucket.params:
            param = self._registry.param_of(tensor)
            if param is not None and param.index in self._due:
                raise ValueError(
                    f"the gradient of {param.name} was reduced twice in one step, but wait-free updates have used it "
                    "already: run all but the last backward under no_sync(), or call protect(wait_free=False)"
                )

    def issued(self, bucket: Bucket, gradients: list[torch.Tensor], work: dist.Work) -> None:
        """A bucket's reduction is under way: update its parameters when it is done."""
        by_optimizer: dict[int, list[tuple[Param, torch.Tensor]]] = {}
        for tensor, grad in zip(bucket.params, gradients, strict=True):
            param = self._registry.param_of(tensor)
            if param is not None and param.optimizer is not None:
                by_optimizer.setdefault(id(param.optimizer), []).append((param, grad))
                self._due.add(param.index)
        attempt = self._attempt

        def update(reduced: torch.futures.Future[list[torch.Tensor]]) -> None:
            reduced.value()  # raises if the reduction failed
            with self._lock:
                if self._stopped or attempt != self._attempt:
                    return
                for pairs in by_optimizer.values():
                    self._update(pairs)

        self._pending.append(work.get_future().then(update))
        if bucket.last:
            after_backward(self._settle)

    def _between_updates(self) -> None:
        """The named point: earlier buckets are updated, this one is not reduced yet."""
        if self._pending and testing.awaited("between_updates", self._step):
            self._pending[-1].wait()  # a fault is due here: make sure that the state is the one the point names
        testing.point("between_updates", self._step)

    def _update(self, pairs: list[tuple[Param, torch.Tensor]]) -> None:
        optimizer = pairs[0][0].optimizer
        assert optimizer is not None
        ledger = self._ledgers.get(id(optimizer))
        tensors, grads = [param.tensor for param, _ in pairs], [grad for _, grad in pairs]
        if ledger is not None:
            ledger.before(tensors, grads)
        pieces.step(optimizer, tensors, grads, elementwise=rule_for(optimizer).steps_elementwise)
        if ledger is not None:
            ledger.after(tensors)
        self._early.update(param.index for param, _ in pairs)
        self._mark(param for param, _ in pairs)

    def _settle(self) -> None:
        """Backward is over, DDP's part of it included. When it returns to the user, the updates are done, too."""
        for future in self._pending:
            future.wait()
        # to notice that someone changes a gradient afterwards
        for index in self._due:
            grad = self._registry.params[index].tensor.grad
            if grad is not None:
                self._versions[index] = grad._version
