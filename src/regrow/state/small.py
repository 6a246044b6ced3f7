"""The small state: captured at every step's start, put back when a step is interrupted.

*Own* state differs from rank to rank (random numbers, buffers, the data's cursor) and is also written to memory that
outlives the worker. *Shared* state (schedulers, scalers, hyperparameters, moving averages) is the same on every rank
and comes from a survivor. Never touches parameters that an optimizer updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regrow.ids import Step
from regrow.slots import Left, Slots
from regrow.state import codec
from regrow.state.registry import Registry, Stateful
from regrow.state.rng import RandomNumbers, put_back

LARGE_BYTES = 1 << 16
"""Tensors of shared objects from this size on are mirrored in place instead of being encoded each step."""

PLACE = "\0regrow.tensor"
"""Marks the place of a large tensor; its number follows."""


class Mirror:
    """A copy of one large tensor, refreshed in place and only when the original was written to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.copy = tensor.detach().clone()
        self._seen = (tensor.data_ptr(), tensor._version)

    def refresh(self, tensor: torch.Tensor) -> None:
        """Take the current values."""
        seen = (tensor.data_ptr(), tensor._version)
        if seen != self._seen:
            self.copy.copy_(tensor)
            self._seen = seen


def lift(value: Any, found: list[torch.Tensor]) -> Any:
    """Return ``value`` with its large tensors replaced by places, and append those tensors to ``found``."""
    if isinstance(value, torch.Tensor) and value.nbytes >= LARGE_BYTES:
        found.append(value)
        return (PLACE, len(found) - 1)
    if isinstance(value, dict):
        lifted = {key: lift(item, found) for key, item in value.items()}
        return lifted if type(value) is dict else _same_mapping(value, lifted)
    if type(value) in (list, tuple):
        return type(value)(lift(item, found) for item in value)
    return value


def lower(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Put the tensors back into the places that ``lift`` made."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == PLACE:
        return tensors[value[1]]
    if isinstance(value, dict):
        lowered = {key: lower(item, tensors) for key, item in value.items()}
        return lowered if type(value) is dict else _same_mapping(value, lowered)
    if type(value) in (list, tuple):
        return type(value)(lower(item, tensors) for item in value)
    return value


def _same_mapping(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    twin = original.copy()
    twin.update(items)
    return twin


class SmallState:
    """Captures, publishes and puts back the small state of this rank."""

    def __init__(
        self, registry: Registry, slots: Slots | None, cursor: Stateful | None, *, leave_shared: bool = False
    ) -> None:
        """``leave_shared``: write the shared state beside the own one, too, since no survivor may have it."""
        self._registry = registry
        self._leave_shared = leave_shared
        self._slots = slots
        self._cursor = cursor
        self._random = RandomNumbers()
        self._others = b""
        self._encoded = b""
        """The own state as last encoded; ``_others`` is the part of it that is not random numbers."""
        self._own = b""
        self._shared = b""
        self._mirrors: list[Mirror] = []
        self._published = b""
        self._last_live = b""
        self.step: Step | None = None
        self.steady = True

    def capture(self, step: Step) -> None:
        """Take the state at the start of ``step``; what was captured before is given up."""
        self._own = self._encode_own()
        self._shared, tensors = self._encode_shared()
        if len(tensors) != len(self._mirrors):
            self._mirrors = [Mirror(tensor) for tensor in tensors]
        else:
            for mirror, tensor in zip(self._mirrors, tensors, strict=True):
                mirror.refresh(tensor)
        if self._last_live:
            self.steady = self._last_live == self._own
        self._published = self._own
        self._last_live = b""
        self.step = step
        if self._slots is not None:
            self._slots.start(step, self._both() if self._leave_shared else self._own)

    def publish(self, step: Step) -> None:
        """Leave the own state for a replacement, before a collective by which others may complete the step.

        Whoever completes a step has had this rank's last contribution to it, so what is published before each
        contribution is never older than what a roll-forward needs.
        """
        own = self._encode_own()
        self._last_live = own
        if own != self._published:
            self._published = own
            if self._slots is not None:
                self._slots.live(step, own)

    def captured(self) -> tuple[bytes, bytes, list[torch.Tensor]]:
        """Return what ``capture`` took: own and shared state, and the large tensors of the shared."""
        return self._own, self._shared, [mirror.copy for mirror in self._mirrors]

    def _both(self) -> bytes:
        return codec.encode({"own": self._own, "shared": self._shared})

    def donated(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return what ``capture`` took, all of it, for ``load_both`` on another rank."""
        return self._both(), [mirror.copy for mirror in self._mirrors]

    def load_both(self, payload: bytes, tensors: list[torch.Tensor] | None) -> None:
        """Put own and shared state in place. ``tensors``: the large ones of the shared; ``None``: as they are now."""
        state = codec.decode(payload)
        self.load_own(state["own"], cursor=True)
        self.load_shared(state["shared"], self._encode_shared()[1] if tensors is None else tensors)

    def left(self) -> Left | None:
        """Return what a replacement of this rank would find of its own state."""
        return None if self._slots is None else self._slots.left()

    def restore(self) -> None:
        """Put back what ``capture`` took. The data's cursor stays: the interrupted step's batch is still at hand."""
        self.load_own(self._own, cursor=False)
        self.load_shared(self._shared, [mirror.copy for mirror in self._mirrors])

    @contextmanager
    def preserving(self) -> Iterator[None]:
        """Leave this rank's own state as it is now, whatever happens to it within; the data's cursor excepted."""
        own = self._encode_own()
        yield
        self.load_own(own, cursor=False)

    # own ---------------------------------------------------------------------------------------------------------

    def _encode_own(self) -> bytes:
        others: dict[str, Any] = {}
        if self._registry.buffers:  # by value: batch normalization writes them without a trace in their version
            others["buffers"] = {name: buffer.detach() for name, buffer in self._registry.buffers.items()}
        if self._registry.own:
            others["objects"] = {name: value.state_dict() for name, value in self._registry.own.items()}
        if self._cursor is not None:
            others["cursor"] = self._cursor.state_dict()
        encoded = codec.encode(others) if others else b""
        if self._random.look() or encoded != self._others or not self._encoded:
            self._others = encoded
            self._encoded = codec.encode({"random": self._random.state(), "others": encoded})
        return self._encoded

    def load_own(self, payload: bytes, *, cursor: bool) -> None:
        """Put own state in place, this rank's or the one that its predecessor left."""
        own = codec.decode(payload)
        if "own" in own:  # the shared state was left beside it
            own = codec.decode(own["own"])
        put_back(own["random"])
        others = codec.decode(own["others"]) if own["others"] else {}
        with torch.no_grad():
            for name, saved in others.get("buffers", {}).items():
                self._registry.buffers[name].copy_(saved)
        for name, state in others.get("objects", {}).items():
            self._registry.own[name].load_state_dict(state)
        if cursor and self._cursor is not None and "cursor" in others:
            self._cursor.load_state_dict(others["cursor"])

    # shared ------------------------------------------------------------------------------------------------------

    def _encode_shared(self) -> tuple[bytes, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        objects = {name: lift(value.state_dict(), tensors) for name, value in self._registry.shared.items()}
        groups = self._registry.hyperparameters()
        return codec.encode({"objects": objects, "groups": groups}), tensors

    def shared(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return the shared state as it stands now, for a rank that has none: encoded part and large tensors."""
        return self._encode_shared()

    def load_shared(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        """Put shared state in place."""
        state = codec.decode(payload)
        for name, skeleton in state["objects"].items():
            self._registry.shared[name].load_state_dict(lower(skeleton, tensors))
        self._registry.set_hyperparameters(state["groups"])
