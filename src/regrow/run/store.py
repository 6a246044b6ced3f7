"""``torch.distributed.Store`` over the agent: it survives every worker, and no call outlives its deadline."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from regrow import wire
from regrow.run.link import Link


class AgentStore(Store):
    """The job's key-value store. Keys of the first set-up stay, so a replacement finds its barriers already passed."""

    def __init__(self, link: Link, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._link = link
        self._timeout = timeout

    def _ask(self, op: str, blob: bytes = b"", wait_s: float = 0.0, **fields: Any) -> wire.Frame:
        frame = self._link.ask(
            {"type": "store", "op": op, "timeout_s": wait_s, **fields}, blob, timeout_s=wait_s + 30.0
        )
        if not frame.head.get("ok"):
            raise dist.DistStoreError(str(frame.head.get("error", f"store {op} failed")))
        return frame

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", value if isinstance(value, bytes) else value.encode(), key=key)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it up to the store's timeout."""
        return self._ask("get", wait_s=self._timeout.total_seconds(), key=key).blob

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask("add", key=key, amount=amount).head["value"])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys=keys).head["value"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        self._ask("wait", wait_s=(timeout or self._timeout).total_seconds(), keys=keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a key if it holds the expected value; return what it holds then."""
        expected, desired = expected_value.encode(), desired_value.encode()
        return self._ask("compare_set", expected + desired, key=key, expected_len=len(expected)).blob

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return bool(self._ask("delete", key=key).head["value"])

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("num_keys").head["value"])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait."""
        return self._timeout
