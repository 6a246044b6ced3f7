"""Until when the workers of a host may hold their ranks: one moment, in memory that they share with their agent.

A host that cannot renew its lease loses its ranks to others, and its agent kills its workers before. But an agent may
be stopped, or hang, while its workers run. So they look themselves, and end when the moment has come.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

_NAME = "fence"
_SIZE = 4096


class Fence:
    """A time on the host's monotonic clock. One number, so that it is read as a whole while it is written."""

    def __init__(self, directory: Path) -> None:
        with (directory / _NAME).open("r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("d")

    @classmethod
    def create(cls, directory: Path) -> Fence:
        """Make one, for the agent; it ends nobody before it is moved."""
        with (directory / _NAME).open("xb") as file:
            file.truncate(_SIZE)
        fence = cls(directory)
        fence.move(math.inf)
        return fence

    def move(self, until_t: float) -> None:
        """Set the time."""
        self._memory[0] = until_t

    @property
    def until_t(self) -> float:
        """The time at which workers have to be gone."""
        return self._memory[0]
