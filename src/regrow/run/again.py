"""Looks for keepers that were given up, beside the training: nobody waits for what does not answer.

A thread of its own tries each of them again, after a few seconds and then less and less often. Who answers is handed
over when the next snapshot is to be sent. Decides nothing else, and ends with the generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from regrow.errors import PeerLost
from regrow.peer.client import Client, Refused
from regrow.peer.memory import Damaged

FIRST_S = 3.0
LONGEST_S = 60.0


class Seeker:
    """Any thread may use it."""

    def __init__(self, make: Callable[[int], Client], greet: Callable[[Client], None]) -> None:
        """``make`` returns a client that is not connected; ``greet`` returns when its keeper has answered."""
        self._make = make
        self._greet = greet
        self._changed = threading.Condition()
        self._due_t: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}
        """How long each host is left alone the next time: it stays long for one that answers and fails again."""
        self._reached: dict[int, Client] = {}
        self._trying: Client | None = None
        self._thread: threading.Thread | None = None
        self._over = False

    def seek(self, node: int) -> None:
        """A keeper was given up: try it again in a while."""
        with self._changed:
            if self._over:
                return
            self._later(node)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="regrow-keeper-again", daemon=True)
                self._thread.start()

    def reached(self) -> dict[int, Client]:
        """Return those that have answered since this was last asked; they are the caller's now."""
        with self._changed:
            found, self._reached = self._reached, {}
        return found

    def stop(self) -> None:
        """Seek nobody any more. Waits for nothing."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            if self._trying is not None:
                self._trying.end()
        for client in self.reached().values():
            client.close()

    def _later(self, node: int) -> None:
        pause_s = self._pause_s.get(node, FIRST_S)
        self._due_t[node] = time.monotonic() + pause_s
        self._pause_s[node] = min(2 * pause_s, LONGEST_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._over and self._due_t and (left_s := min(self._due_t.values()) - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                if self._over or not self._due_t:
                    self._thread = None
                    return
                node = min(self._due_t, key=self._due_t.__getitem__)
                self._trying = client = self._make(node)
            answered = False
            try:
                self._greet(client)
                answered = True
            except (OSError, Refused, Damaged, PeerLost):
                pass  # it was said when it was given up
            finally:
                with self._changed:
                    self._trying = None
                    if answered and not self._over:
                        del self._due_t[node]
                        self._reached[node] = client
                    else:
                        client.close()
                        self._later(node)
