"""What a rank holds, at which step it stands, and how another state takes the place of its own. Talks to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from regrow.ddp import Buckets
from regrow.ids import Rank, Step
from regrow.plan import Copy, Own, Settle
from regrow.slots import Left
from regrow.state import image, resized
from regrow.state.registry import Registry
from regrow.state.small import SmallState
from regrow.updates import Updates

if TYPE_CHECKING:  # what it knows takes seconds to import, and most runs do not need it
    from regrow.disk.saved import Saved


class Standing:
    """The state of one rank between and within steps."""

    def __init__(
        self, rank: Rank, registry: Registry, small: SmallState, updates: Updates, buckets: list[Buckets]
    ) -> None:
        self._rank = rank
        self._registry = registry
        self._small = small
        self._updates = updates
        self._buckets = buckets
        self.moved = False
        """Whether a plan has put this rank elsewhere than it was, perhaps to another try of the same step's number."""
        self._set_back = False
        """Whether a recovery has put this rank at the start of its step, and no step has begun since."""
        self._left: Left | None = None
        self._layouts: list[Any] = []
        """The layouts of DDP's buckets at the start of the plan's step."""
        self._large: list[torch.Tensor] | None = None
        """Large tensors of what ranks share, as the running checkpoint has them."""
        self._replaced = False
        """Whether this rank's parameters were replaced since it last went on."""
        self._perturbed = False
        """Whether this rank's state is not that of its step's start, and no step has begun since."""
        self.step: Step | None = Step(0)
        """Completed steps; ``None`` while this rank is a replacement that holds nothing."""

    def arrive(self, left: Left) -> None:
        """This is a replacement: it holds nothing but what its predecessor left."""
        self.step = None
        self._left = left

    def capture(self) -> None:
        """Take the state at the start of a step; a retry goes on from what was taken the first time."""
        assert self.step is not None
        if self._small.step != self.step:
            self._small.capture(self.step)
            for buckets in self._buckets:
                buckets.start()

    def small_part(self) -> image.Small:
        """Return what ``capture`` took, for a checkpoint."""
        own, shared, large = self._small.captured()
        return image.Small(own, shared, large, [buckets.at_start() for buckets in self._buckets])

    @contextmanager
    def preserving(self) -> Iterator[None]:
        """Take away the traces that running the model within leaves in buffers, random numbers and DDP."""
        with ExitStack() as stack:
            stack.enter_context(self._small.preserving())
            for buckets in self._buckets:
                stack.enter_context(buckets.preserving())
            yield

    def settle_buckets(self) -> None:
        """Let DDP's buckets be what they are to be in the next step, while this one can still be done again."""
        for buckets in self._buckets:
            buckets.settle()

    def begin_from(self, saved: Saved) -> None:
        """The run begins with a checkpoint that an earlier one has left, perhaps with another number of ranks."""
        self._install(saved, saved.world)
        self.moved = self._set_back = False  # nobody has been anywhere yet

    def _install(self, saved: image.Image | Saved, world: int | None = None) -> None:
        """Go back to this rank's own checkpoint or snapshot: all of its state is then that of the step's start.

        ``world``: how many ranks there were then; a rank that did not exist has random numbers of its own.
        """
        self._replaced, self._perturbed = True, False
        self._updates.complete()  # whatever the interrupted step has done is overwritten
        self.step, self._left = None, self._small.left()  # if it is found damaged, this rank is its own replacement
        saved.install(self._registry)
        self._small.load_shared(saved.small.shared, saved.small.large)
        self._small.load_own(saved.small.own, cursor=True)
        if world is not None:
            resized.fork(self._rank, world, saved.step)
        self._layouts = saved.small.layouts
        self._left = None
        self._arrived(saved.step)
        self.moved = self._set_back = True

    def _received(self, copy: Copy) -> None:
        """A copy to this rank is in place: from now on that is what it holds."""
        if copy.params is not None:
            self._updates.forget(copy.params)
        elif copy.staged:
            self._replaced = True
            self._updates.complete()
            self._arrived(copy.step)

    def _settle(self, action: Settle) -> None:
        match action.own:
            case Own.CAPTURED:
                self._small.restore()
            case Own.CURRENT | Own.CHECKPOINT | Own.SNAPSHOT:
                pass  # captured when the copy was put in place
            case Own.PREDECESSOR:
                assert self._left is not None
                self._take_over(self._left.starts[action.step], action.step)
            case Own.PREDECESSOR_LIVE:
                assert self._left is not None and self._left.live is not None
                self._take_over(self._left.live[1], action.step)
            case Own.LEFT:
                self._go_by_what_was_left(action.step)
            case Own.DONATED:  # it came with a copy
                resized.reseed(self._rank, action.step)
                self._arrived(action.step)
                self._left, self._large = None, None

    def _go_by_what_was_left(self, step: Step) -> None:
        """Take up small state that this rank, or its predecessor, has left; the parameters are what they are."""
        left = self._left if self.step is None else self._small.left()
        assert left is not None
        self._perturbed = True
        self._small.load_both(left.starts[step], self._large if self.step is None else None)
        self._arrived(step)
        self._left, self._large, self.moved = None, None, True

    def _take_over(self, own: bytes, step: Step) -> None:
        self._small.load_own(own, cursor=True)
        self._arrived(step)
        self._left = None

    def _arrived(self, step: Step) -> None:
        """From now on this rank holds the state at the start of ``step``, its predecessor's or another rank's."""
        for buckets, layout in zip(self._buckets, self._layouts, strict=True):
            buckets.take(layout)
        self._small.capture(step)
        self.step = step
