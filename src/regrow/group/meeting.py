"""The store through which one gloo group meets: fenced by generation, and abandoned at once when that generation ends.

Never lets a key of another generation through, and never waits past its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from regrow.errors import PeerLost

_FIRST_PAUSE_S = 0.0003
_LONGEST_PAUSE_S = 0.008


class MeetingStore(Store):
    """What gloo sees as its store while it connects one group.

    ``on_address`` gets what each rank publishes about itself (whether it is ours, and the bytes): ours first, and
    before any connection is opened.
    """

    def __init__(
        self,
        base: Store,
        *,
        prefix: str,
        ended: threading.Event,
        deadline: float,
        on_address: Callable[[bool, bytes], None],
    ) -> None:
        super().__init__()
        self._base = base
        self._prefix = prefix
        self._ended = ended
        self._deadline = deadline
        self._on_address = on_address

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise PeerLost(f"the meeting {self._prefix!r} was called off")

    def set(self, key: str, value: bytes | str) -> None:
        """Publish; gloo publishes nothing but this rank's address."""
        self._check_open()
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._on_address(True, data)
        self._base.set(self._prefix + key, data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Read what a peer published, waiting for it."""
        self.wait([key])
        value: bytes = self._base.get(self._prefix + key)
        self._on_address(False, value)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for the keys until the deadline or the generation's end.

        Asks again and again, soon at first and then less often: a wait inside the store could not be called off.
        """
        names = [self._prefix + key for key in keys]
        deadline = (
            self._deadline if timeout is None else min(self._deadline, time.monotonic() + timeout.total_seconds())
        )
        pause_s = _FIRST_PAUSE_S
        while True:
            self._check_open()
            if self._base.check(names):
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no peer published {names} in time")
            self._ended.wait(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self._check_open()
        return self._base.check([self._prefix + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Count under the fence."""
        self._check_open()
        return self._base.add(self._prefix + key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Compare and set under the fence."""
        self._check_open()
        return self._base.compare_set(self._prefix + key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Delete under the fence."""
        return self._base.delete_key(self._prefix + key)

    def has_extended_api(self) -> bool:
        """Keep to the few operations that every store has."""
        return False
