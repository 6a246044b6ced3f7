"""The random numbers of this process: torch's, Python's, numpy's global one.

Asked for before every collective, in the middle of backward, where each cache line that is touched has to come from
memory: so it is first found out, as cheaply as each generator allows, whether anything has changed at all.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

_PYTHON = struct.Struct("<625I")
_MT19937_BYTES = 624 * 4 + 4
"""Of numpy's Mersenne Twister: the key and the position in it."""


class RandomNumbers:
    """The state of all generators when last looked at."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._cuda: list[torch.Tensor] = []
        self._python: tuple[Any, ...] = ()
        self._numpy: dict[str, Any] | None = None
        self._raw = b""

    def look(self) -> bool:
        """Take the state as it is now; return whether it differs from what was seen before."""
        changed = self._look_at_torch()
        python = random.getstate()
        if python != self._python:
            self._python, changed = python, True
        # each has to be looked at, whatever the others say
        changed = self._look_at_numpy() or changed
        return self._look_at_cuda() or changed

    def _look_at_torch(self) -> bool:
        state = torch.default_generator.get_state()
        if self._torch is not None and torch.equal(state, self._torch):
            return False
        self._torch = state
        return True

    def _look_at_numpy(self) -> bool:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        raw = _raw_state(numpy)
        # A second normal number is kept aside and given out later without a trace in the raw state, so only if there is
        # none does an equal raw state mean that nothing was drawn: keeping one aside takes a draw.
        if raw and raw == self._raw and self._numpy is not None and not self._numpy["has_gauss"]:
            return False
        state = numpy.random.get_state(legacy=False)
        changed = self._numpy is None or _comparable(state) != _comparable(self._numpy)
        self._raw, self._numpy = raw, state
        return changed

    def _look_at_cuda(self) -> bool:
        if not torch.cuda.is_initialized():
            return False
        states = torch.cuda.get_rng_state_all()
        if len(states) == len(self._cuda) and all(map(torch.equal, states, self._cuda)):
            return False
        self._cuda = states
        return True

    def state(self) -> dict[str, Any]:
        """Return what was seen last, as the codec takes it."""
        version, internal, gauss = self._python
        found: dict[str, Any] = {"torch": self._torch, "python": (version, _PYTHON.pack(*internal), gauss)}
        if self._numpy is not None:
            found["numpy"] = self._numpy
        if self._cuda:
            found["cuda"] = self._cuda
        return found


def put_back(state: dict[str, Any]) -> None:
    """Set all generators to what ``RandomNumbers.state`` gave."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, _PYTHON.unpack(internal), gauss))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _raw_state(numpy: Any) -> bytes:
    """Return the memory of numpy's global generator, or nothing where it is not the usual one."""
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _comparable(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return a numpy state as something that can be compared."""
    return tuple(
        _comparable(value) if isinstance(value, dict) else value.tobytes() if hasattr(value, "tobytes") else value
        for value in state.values()
    )
