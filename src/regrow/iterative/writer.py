"""The thread that brings saved blocks to storage while the algorithm goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from regrow.iterative.record import Record
from regrow.iterative.storage import Storage


class Writer:
    """Writes one round of blocks at a time. It reads the arrays it is given until ``wait`` says that it is done."""

    def __init__(self, storage: Storage | Path) -> None:
        """``storage``: a directory, if it is to be made with the first round, which has all blocks then."""
        self._storage = storage
        self._changed = threading.Condition()
        self._round: Sequence[Record] | None = None
        self._closing = False
        self.owed: frozenset[str] = frozenset()
        """Blocks whose last record could not be written; to be read when none is under way."""
        self.failure: str | None = None
        """Why not; ``None``: all is on storage."""
        self._thread = threading.Thread(target=self._run, name="regrow-running-checkpoint", daemon=True)
        self._thread.start()

    def submit(self, records: Sequence[Record]) -> None:
        """Have these written. None may be under way."""
        with self._changed:
            assert self._round is None and not self._closing
            self._round = records
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._round is None, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread after what is under way; whether it has ended. What hangs in the kernel cannot be ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if isinstance(self._storage, Storage):
            self._storage.close()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                # no deadline: woken by every round and by close()
                self._changed.wait_for(lambda: self._round is not None or self._closing)
                if self._round is None:
                    return
                records = self._round
            owed, failure = frozenset[str](), None
            try:
                if isinstance(self._storage, Path):
                    self._storage = Storage(self._storage, records)
                else:
                    self._storage.write(records)
            except (OSError, ValueError, RuntimeError) as error:  # full, gone, or unreadable: the algorithm goes on
                owed = frozenset(each.name for each in records)
                failure = f"{len(owed)} blocks could not be written to storage: {error}"
            with self._changed:
                self.owed, self.failure = owed, failure
                self._round = None
                self._changed.notify_all()
