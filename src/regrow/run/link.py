"""A worker's connection to its host's agent, and the thread that watches it.

The watcher thread learns of a new generation and wakes the main thread out of whatever collective it is stuck in. It
never waits for anything but the agent, takes no lock that a collective holds, and ends the process when the agent is
gone.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow import wire
from regrow.errors import LinkLost, Superseded
from regrow.fence import Fence
from regrow.ids import Generation


@dataclass(frozen=True, kw_only=True)
class WorldView:
    """What the agent last said of the world."""

    generation: Generation
    phase: str = ""
    lost: tuple[dict[str, Any], ...] = ()
    holders: tuple[int, ...] = ()
    all_finished: bool = False
    setup_deadline_s: float = 60.0
    """How long a replacement may take; longer than its agent gives it, so that the agent decides."""
    homeless: tuple[int, ...] = ()
    """Ranks that no host has room for: they come when one is found, however long that takes."""


class Link:
    """The connection. Any thread may send and ask; only the watcher reads."""

    def __init__(self, path: str, hello: dict[str, Any], *, timeout_s: float = 30.0) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout_s)
        try:
            self._sock.connect(path)
        except OSError as error:
            raise LinkLost(f"no agent answers at {path}: {error}") from None
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._replies: dict[int, wire.Frame] = {}
        self._next_id = 0
        self.world = WorldView(generation=Generation(0))
        self.on_generation: Callable[[WorldView], None] | None = None
        self.beat: Callable[[], dict[str, Any]] = dict
        self._watcher: threading.Thread | None = None
        self._fence = Fence(Path(path).parent) if Path(path).with_name("fence").exists() else None
        self._beat_every_s = 1.0
        self._closing = False
        self.send(hello)

    def wait_assignment(self) -> wire.Frame:
        """Block until the agent gives this process a rank. A spare waits here for as long as it is not needed."""
        self._sock.settimeout(None)
        try:
            while True:
                frame = wire.recv_frame(self._sock)
                if frame.head["type"] == "assign":
                    return frame
        except (EOFError, OSError):
            raise LinkLost("the agent ended before it gave this process a rank") from None

    def watch(self, generation: Generation, dead_after_s: float) -> None:
        """Start the watcher thread."""
        self.world = WorldView(generation=generation)
        self._beat_every_s = dead_after_s / 5
        self._watcher = threading.Thread(target=self._run, name="regrow-watcher", daemon=True)
        self._watcher.start()

    # main thread ---------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        """The newest generation that the agent has told of."""
        return self.world.generation

    def send(self, head: dict[str, Any], blob: bytes = b"") -> None:
        """Send one frame."""
        data = wire.encode(head, blob)
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            raise LinkLost(f"the agent is gone: {error}") from None

    def ask(
        self, head: dict[str, Any], blob: bytes = b"", *, timeout_s: float, current: int | None = None
    ) -> wire.Frame:
        """Send a request and wait for its reply.

        Raises:
            TimeoutError: no reply came in time.
            Superseded: ``current`` was given and a newer generation began.
        """
        with self._changed:
            self._next_id += 1
            number = self._next_id
        self.send({**head, "id": number}, blob)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while number not in self._replies:
                if current is not None and self.world.generation != current:
                    raise Superseded(current, self.world.generation)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the agent did not answer {head['type']} within {timeout_s:.0f} s")
                self._changed.wait(left)
            return self._replies.pop(number)

    def wait_for(self, ready: Callable[[WorldView], bool], *, timeout_s: float) -> bool:
        """Wait until the world is as asked; ``False`` when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: ready(self.world), timeout_s)

    def close(self) -> None:
        """Leave; the agent learns the rest from the exit code."""
        self._closing = True
        self._sock.close()

    # watcher thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._sock.settimeout(60.0)
            next_beat = time.monotonic()
            while True:
                now, until_t = time.monotonic(), math.inf if self._fence is None else self._fence.until_t
                if now >= until_t:
                    self._fenced()
                if now >= next_beat:
                    self.send({"type": "heartbeat", **self.beat()})
                    next_beat = now + self._beat_every_s
                ready = select.poll()  # not ``select``, which takes no descriptor above 1023
                ready.register(self._sock, select.POLLIN)
                if ready.poll(max(0.0, min(next_beat, until_t) - time.monotonic()) * 1000):
                    self._take(wire.recv_frame(self._sock))
        except (EOFError, OSError, ValueError, LinkLost) as error:
            if not self._closing:
                # Nobody is left to heal this rank or to end it: os._exit, since sys.exit would end only this thread.
                print(
                    f"[regrow] the agent of this host is gone ({error}); this worker ends", file=sys.stderr, flush=True
                )
                os._exit(1)

    def _fenced(self) -> None:
        """Another host may hold this rank by now. Not even what was forked may do anything more."""
        print("[regrow] this host is cut off from the others; this worker ends", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)

    def _take(self, frame: wire.Frame) -> None:
        head = frame.head
        match head["type"]:
            case "reply":
                with self._changed:
                    self._replies[head["id"]] = frame
                    self._changed.notify_all()
            case "world":
                view = WorldView(
                    generation=Generation(head["generation"]),
                    phase=head.get("phase", ""),
                    lost=tuple(head.get("lost", ())),
                    holders=tuple(head.get("holders", ())),
                    all_finished=bool(head.get("all_finished")),
                    setup_deadline_s=float(head.get("setup_deadline_s", 60.0)) + 10.0,
                    homeless=tuple(head.get("homeless", ())),
                )
                newer = view.generation > self.world.generation
                if newer and self.on_generation is not None:
                    # Before the main thread can see the new generation, so that it never connects what is then severed.
                    self.on_generation(view)
                with self._changed:
                    self.world = view
                    self._changed.notify_all()
            case _:
                pass
