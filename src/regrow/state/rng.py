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

_WORDS = 624
_WORD_BYTES = 4
_PYTHON = struct.Struct(f"<{_WORDS + 1}I")


class RandomNumbers:
    """The state of all generators when last looked at."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._torch_raw = b""
        self._cuda: list[torch.Tensor] = []
        self._python: tuple[Any, ...] = ()
        self._python_raw = b""
        self._python_address = _address_of_python()
        self._numpy: dict[str, Any] | None = None
        self._numpy_raw = b""

    def look(self) -> bool:
        """Take the state as it is now; return whether it differs from what was seen before."""
        # each has to be looked at, whatever the others say
        changed = self._look_at_torch()
        changed = self._look_at_python() or changed
        changed = self._look_at_numpy() or changed
        return self._look_at_cuda() or changed

    def _look_at_torch(self) -> bool:
        state = torch.default_generator.get_state()
        raw = ctypes.string_at(state.data_ptr(), state.numel())
        if raw == self._torch_raw:
            return False
        self._torch, self._torch_raw = state, raw
        return True

    def _look_at_python(self) -> bool:
        raw = b""
        if self._python_address is not None:
            raw = ctypes.string_at(self._python_address, _PYTHON.size)
            if raw == self._python_raw and getattr(_of_python(), "gauss_next", None) == self._python[2]:
                return False
        state = random.getstate()
        changed = state != self._python
        self._python, self._python_raw = state, raw
        return changed

    def _look_at_numpy(self) -> bool:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        raw = _raw_of_numpy(numpy)
        # A second normal number is kept aside and given out later without a trace in the raw state, so only if there is
        # none does an equal raw state mean that nothing was drawn: keeping one aside takes a draw.
        if raw and raw == self._numpy_raw and self._numpy is not None and not self._numpy["has_gauss"]:
            return False
        state = numpy.random.get_state(legacy=False)
        changed = self._numpy is None or _comparable(state) != _comparable(self._numpy)
        self._numpy, self._numpy_raw = state, raw
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


# the private parts: what each generator's memory looks like -----------------------------------------------------------


def _of_python() -> Any:
    """Return the object behind the functions of ``random``."""
    return random.random.__self__  # type: ignore[attr-defined]


def _address_of_python() -> int | None:
    """Find where Python's generator keeps its position and words; ``None`` where it does so in another way.

    Found by what is there, so a Python that lays it out otherwise costs time and nothing else.
    """
    generator = _of_python()
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    words = generator.getstate()[1]
    memory = ctypes.string_at(id(generator), type(generator).__basicsize__)
    at = memory.find(struct.pack(f"={_WORDS}I", *words[:_WORDS]))
    position = at - _WORD_BYTES
    if position < 0 or memory[position:at] != struct.pack("=I", words[_WORDS]):
        return None
    return id(generator) + position


def _raw_of_numpy(numpy: Any) -> bytes:
    """Return the words and the position of numpy's global generator, or nothing where it is not the usual one."""
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _PYTHON.size)


def _comparable(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return a numpy state as something that can be compared."""
    return tuple(
        _comparable(value) if isinstance(value, dict) else value.tobytes() if hasattr(value, "tobytes") else value
        for value in state.values()
    )
