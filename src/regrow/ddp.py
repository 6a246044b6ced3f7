"""The one place that touches DistributedDataParallel's private parts.

Four things are needed that DDP does not offer: to forget an interrupted backward, to keep the layout of its gradient
buckets across a recovery (the order in which a ring sums an element depends on where it lies in its bucket), to give a
replacement that layout, and to know when a bucket is reduced without taking over its reduction. All rest on methods of
its reducer and on the order in which it works; ``tests/test_ddp_seam.py`` fails when PyTorch changes them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.group import Fabric, HealingGroup

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
    """Keeps one DDP module's bucket layout the same on every rank and in every generation.

    The layout is state like any other: a step that is done again must find the buckets that it found the first time,
    and who takes over another rank's state takes its buckets with it.
    """

    def __init__(self, ddp: DistributedDataParallel, fabric: Fabric) -> None:
        missing = [name for name in REDUCER_METHODS if not hasattr(ddp.reducer, name)]
        if missing:
            raise RuntimeError(f"this PyTorch's DDP reducer lacks {missing}: regrow supports torch 2.13")
        self._ddp = ddp
        self._fabric = fabric
        self._first = _first_layout(ddp)
        self.builds = 0
        """Counts what makes buckets anew, or takes them out of the middle of a backward."""
        self.layout: list[list[int]] | None = None
        """What the rebuilding of buckets would broadcast from rank 0; ``None`` before it has happened."""
        self.layout_at_start: list[list[int]] | None = None
        """The layout when the step in progress began."""
        self._syncs_at_start = bool(ddp.require_forward_param_sync)
        """Whether DDP's first forward of the step in progress was to broadcast the buffers: not after ``no_sync()``."""
        self._hook = ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():  # DDP's own condition, the same under no_sync()
            self.settle()

    def settle(self) -> None:
        """Rebuild the buckets if a first synchronised backward has shown the order of the gradients.

        DDP does it at the next forward. A loss may be heard of between the step that shows the order and that forward;
        whoever healed then would run one more step with the first buckets. So this is called before the first update,
        and before a step is complete: when the next step begins the layout is known, and the same on every rank.
        """
        if self.layout is not None:
            return
        seen: list[list[int]] = []
        try:
            rebuilt = self._rebuild(seen, None)
        except RuntimeError:  # a backward left parameters out: DDP says so itself, at the next forward
            return
        if not rebuilt:
            return
        self.layout = seen
        self.builds += 1
        self._hook.remove()
        self._agree()

    def start(self) -> None:
        """A step begins: this is what to return to when it is done again."""
        self.layout_at_start = self.layout
        self._syncs_at_start = bool(self._ddp.require_forward_param_sync)

    def at_start(self) -> list[Any]:
        """Return what whoever takes over the state at this step's start must ``take``, as JSON has it."""
        return [self.layout_at_start, self._syncs_at_start]

    @contextmanager
    def preserving(self) -> Iterator[None]:
        """Let DDP's next forward be the one that it is now, though another one may be run within.

        After a forward DDP waits for gradients: those of the next backward, which may be meant to stay here.
        """
        syncs = self._ddp.require_forward_param_sync
        yield
        self._ddp.require_forward_param_sync = syncs
        self.apply(self.layout)

    def take(self, given: list[Any]) -> None:
        """Be as another rank, or an earlier process of this one, was at the start of a step."""
        layout, syncs = given
        if self.layout != layout:
            self.apply(layout)
        self._ddp.require_forward_param_sync = syncs
        self.start()

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

    def abandon(self) -> None:
        """Forget an interrupted backward, and go back to the buckets with which the step began."""
        self.apply(self.layout_at_start)
        self._ddp.require_forward_param_sync = self._syncs_at_start

    def apply(self, layout: list[list[int]] | None) -> None:
        """Forget an interrupted backward and take the layout (``None``: buckets were not rebuilt yet).

        What the step goes back to when it is done again stays as it was: ``start`` says what that is.
        """
        self.builds += 1
        self._ddp.reducer._reset_state()
        if layout is not None or self.layout is not None:
            self._ddp.reducer._push_all_rebuilt_params()
            if not self._rebuild([], self._first if layout is None else layout):
                raise RuntimeError("DDP did not rebuild its buckets: regrow supports torch 2.13")
        if layout is not None:
            self._hook.remove()
        elif self.layout is not None:
            self._ddp.reducer._reset_state()  # the first buckets are there, and are yet to be rebuilt
            self._ddp._has_rebuilt_buckets = False
            self._hook = self._ddp.register_forward_pre_hook(self._before_forward)
        self.layout = layout

    def contents(self) -> list[Bucket]:
        """Return the buckets in the order in which they are reduced; none before they were rebuilt."""
        if self.layout is None:
            return []
        indices, sizes = self.layout
        params = [param for param in self._ddp._module_parameters if param.requires_grad]
        found, start = [], 0
        for number, size in enumerate(sizes):
            members = tuple(params[index] for index in indices[start : start + size])
            found.append(Bucket(number, number == len(sizes) - 1, members))
            start += size
        return found


def _first_layout(ddp: DistributedDataParallel) -> list[list[int]]:
    """Return the layout of the buckets that DDP is built with, as the rebuilding of buckets would broadcast it."""
    params, sparse = ddp._build_params_for_reducer()
    limits, _ = ddp._bucket_config.compute_bucket_size_limits(
        static_graph=ddp.static_graph, find_unused_parameters=ddp.find_unused_parameters
    )
    assigned, _ = dist._compute_bucket_assignment_by_size(params, limits, sparse)  # type: ignore[attr-defined]
    buckets = list(reversed(assigned))
    return [[*itertools.chain(*buckets), len(buckets)], [len(bucket) for bucket in buckets]]


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """The parameters whose gradients are reduced together."""

    index: int
    last: bool
    params: tuple[torch.Tensor, ...]

    def numel(self) -> int:
        """Return the number of elements of all its gradients."""
        return sum(param.numel() for param in self.params)

    def gradients(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' gradients as views of the bucket's buffer."""
        found, start = [], 0
        for param in self.params:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            if reach == param.numel():  # dense in some order (channels last): the gradient lies in the same order
                found.append(buffer.as_strided(param.shape, param.stride(), buffer.storage_offset() + start))
            else:
                found.append(buffer.narrow(0, start, param.numel()).view(param.shape))
            start += param.numel()
        return found


class BucketListener(Protocol):
    """Wants to know of the reductions of DDP's buckets. Called in the thread that runs backward."""

    def reducing(self, bucket: Bucket) -> None:
        """This bucket's reduction is about to be issued."""

    def issued(self, bucket: Bucket, gradients: list[torch.Tensor], work: dist.Work) -> None:
        """This bucket's reduction is under way; when ``work`` is done the gradients are the mean over all ranks."""


class Reductions:
    """Tells of the reductions of one DDP module's buckets, which DDP issues itself.

    A communication hook would tell of them, too, but leaves it to the hook to scale the gradients, which costs another
    pass over all of them; DDP does it while it copies. So the group tells of every sum, and those of buckets are known
    by the address of their buffer. The addresses are learnt in the first backward after buckets were built: of what was
    summed in it, the buffers that after it hold the very gradients of a bucket's parameters.
    """

    TRIES = 10

    def __init__(self, ddp: DistributedDataParallel, buckets: Buckets, listener: BucketListener) -> None:
        group = ddp.process_group
        if not isinstance(group, HealingGroup):
            raise ValueError(
                "protect(wait_free=True): the DistributedDataParallel model uses a process group that regrow did not "
                "make; leave process_group unset, or pass one made by dist.new_group() with the default backend"
            )
        if ddp._comm_hooks or getattr(ddp, "mixed_precision", None) is not None:
            raise ValueError(
                "protect(wait_free=True): a communication hook or mixed_precision of DistributedDataParallel changes "
                "the gradients between their reduction and the update; use one or the other"
            )
        self._buckets = buckets
        self._listener = listener
        self._build = -1
        self._contents: list[Bucket] = []
        self._seen: list[torch.Tensor] = []
        self._known: dict[int, Bucket] = {}
        self._tries = 0
        group.watchers.append(self)

    def summing(self, tensor: torch.Tensor) -> None:
        """The group is about to sum a tensor over the ranks."""
        if self._build != self._buckets.builds:
            self._build = self._buckets.builds
            self._contents = self._buckets.contents()
            self._known.clear()
            self._seen.clear()
        bucket = self._known.get(tensor.data_ptr())
        if bucket is not None:
            self._listener.reducing(bucket)

    def issued(self, tensor: torch.Tensor, work: dist.Work) -> None:
        """The group sums a tensor over the ranks."""
        bucket = self._known.get(tensor.data_ptr())
        if bucket is not None:
            self._listener.issued(bucket, bucket.gradients(tensor), work)
        elif not self._known:
            self._learn(tensor)

    def _learn(self, tensor: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1 or tensor.dim() != 1:  # not in a backward
            return
        if any(tensor.numel() == bucket.numel() for bucket in self._contents):
            if not self._seen:
                after_backward(self._verify)
            self._seen.append(tensor)

    def _verify(self) -> None:
        seen, self._seen = self._seen, []
        found: dict[int, Bucket] = {}
        for bucket in self._contents:
            buffers = [buffer for buffer in seen if buffer.numel() == bucket.numel()]
            buffer = next((buffer for buffer in buffers if _are_gradients(bucket, buffer)), None)
            if buffer is not None:
                found[buffer.data_ptr()] = bucket
        if len(found) == len(self._contents):
            self._known, self._tries = found, 0
            return
        self._tries += 1
        if self._tries == self.TRIES:
            print(
                "[regrow] wait-free updates are off: what DistributedDataParallel reduces are not the gradients that "
                "it leaves in the parameters; the result is right all the same",
                file=sys.stderr,
                flush=True,
            )


def _are_gradients(bucket: Bucket, buffer: torch.Tensor) -> bool:
    return all(
        param.grad is not None and param.grad.dtype == gradient.dtype and torch.equal(param.grad, gradient)
        for param, gradient in zip(bucket.params, bucket.gradients(buffer), strict=True)
    )
