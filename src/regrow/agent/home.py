"""The directory that a run owns on one host: workers' small state (shared memory) and the agent's socket.

Only this user can enter it. It goes with the agent; what a killed agent has left behind goes with the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "owner.lock"
_PREFIX = "regrow-"


class Home:
    """Creates the directory; ``close`` removes it. A lock that dies with us says that it is in use."""

    def __init__(self, run_id: str, node: int) -> None:
        root = Path("/dev/shm")
        if not os.access(root, os.W_OK | os.X_OK):
            root = Path(tempfile.gettempdir())
        _sweep(root)
        while True:
            # the name is cut: a unix socket's path has 107 bytes
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{run_id[:40]}-{node}-", dir=root))
            self._lock = (self.path / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            self._lock.close()  # another agent has swept it away before it was locked

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its agent lives
                shutil.rmtree(path, ignore_errors=True)
