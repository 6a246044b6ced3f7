"""The one place that touches DistributedDataParallel's private parts.

Three things are needed that DDP does not offer: to forget an interrupted backward, to keep the layout of its gradient
buckets across a recovery (the order in which a ring sums an element depends on where it lies in its bucket), and to
give a replacement that layout. All are done with methods of its reducer; ``tests/test_ddp_seam.py`` fails when
PyTorch changes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.group import Fabric

REDUCER_METHODS = ("_rebuild_buckets", "_reset_state", "_push_all_rebuilt_params")


def find_ddp(module: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP wrappers in a module, itself included."""
    return [child for child in module.modules() if isinstance(child, DistributedDataParallel)]


def after_backward(call: Callable[[], None]) -> None:
    """Run ``call`` when the backward pass in progress, DDP's own end of it included, is over."""
    engine = torch.autograd.Variable._execution_engine
    # DDP queues its end of backward after the last bucket's hook has run: queue from within the queue, to come later.
    engine.queue_callback(lambda: engine.queue_callback(call))


class Buckets:
    """Keeps one DDP module's bucket layout the same on every rank and in every generation."""

    def __init__(self, ddp: DistributedDataParallel, fabric: Fabric) -> None:
        missing = [name for name in REDUCER_METHODS if not hasattr(ddp.reducer, name)]
        if missing:
            raise RuntimeError(f"this PyTorch's DDP reducer lacks {missing}: regrow supports torch 2.13")
        self._ddp = ddp
        self._fabric = fabric
        self.layout: list[list[int]] | None = None
        """What the rebuilding of buckets would broadcast from rank 0; ``None`` before it has happened."""
        # DDP rebuilds at the first forward after its first synchronised backward; the hook does it just before, so that
        # the layout is known (and kept) on every rank instead of living in the reducer alone.
        self._hook = ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():  # DDP's own condition, the same under no_sync()
            return
        seen: list[list[int]] = []
        if not self._rebuild(seen, None):
            return
        self.layout = seen
        self._hook.remove()
        self._agree()

    def _rebuild(self, seen: list[list[int]], given: list[list[int]] | None) -> bool:
        """Let the reducer rebuild without its peers, noting what it would send and answering with what is given."""

        def answer(op: str, tensors: list[torch.Tensor]) -> None:
            assert op == "broadcast"
            for tensor in tensors:
                if given is not None:
                    values = torch.tensor(given[len(seen)], dtype=tensor.dtype)
                    tensor.copy_(values.view_as(tensor))
                seen.append(tensor.flatten().tolist())

        with self._fabric.answering(answer):
            rebuilt = bool(self._ddp.reducer._rebuild_buckets())
        if rebuilt:
            self._ddp._has_rebuilt_buckets = True
        return rebuilt

    def _agree(self) -> None:
        """Take rank 0's layout, as DDP does."""
        assert self.layout is not None
        flat = torch.tensor([len(self.layout), *map(len, self.layout), *itertools.chain(*self.layout)])
        mine = flat.clone()
        dist.broadcast(flat, group_src=0, group=self._ddp.process_group)
        if torch.equal(flat, mine):
            return
        values = flat.tolist()
        count, rest = values[0], values[1 + values[0] :]
        layout = []
        for size in values[1 : 1 + count]:
            layout.append(rest[:size])
            rest = rest[size:]
        self.apply(layout)

    def apply(self, layout: list[list[int]] | None) -> None:
        """Forget an interrupted backward and take the layout (``None``: buckets were not rebuilt yet)."""
        self._ddp.reducer._reset_state()
        if layout is None:
            return
        self._hook.remove()
        self._ddp.reducer._push_all_rebuilt_params()
        if not self._rebuild([], layout):
            raise RuntimeError("DDP did not rebuild its buckets: regrow supports torch 2.13")
        self.layout = layout
