"""Where the peers of a run come in, and where everybody else is sent away, with the address and the reason.

A port that listens is found by others than this run's ranks, too. Until it has shown the run's token, a connection may
say no more than a few kilobytes, within ten seconds in all; so many of them may wait, and no more: one that has said
nothing yet makes room for the next. So strangers cost a bounded number of descriptors, threads and lines, whatever they
send. What a peer that was let in may say is not known here.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from regrow import wire

HELLO_S = 10.0
"""So long a connection has, to say who it is."""
MOST_UNKNOWN = 64
"""So many connections may wait at one port that have not said yet who they are."""
NO_TOKEN = "its token is not this run's"
CROWDED = "it said nothing while others came"
_TRY_AGAIN_S = 0.25
_CLOSE_S = 5.0
_LINES, _WINDOW_S = 20, 60.0

Say = Callable[[str], None]
Connection = TypeVar("Connection")


def token_matches(offered: object, token: str) -> bool:
    """Compare a secret in constant time."""
    return isinstance(offered, str) and hmac.compare_digest(_bytes(offered), _bytes(token))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # half a character, from a stranger or from the environment


def proof(token: str, of: str) -> str:
    """Return what shows that whoever wrote it knows the token, and does not give the token away."""
    return hmac.new(_bytes(token), _bytes(of), "sha256").hexdigest()


def reason(error: BaseException) -> str:
    """Return what a stranger did wrong, in words; nothing of what it has sent is repeated."""
    if isinstance(error, TimeoutError):
        return f"it did not say who it is within {HELLO_S:g} s"
    if isinstance(error, EOFError):
        return "it left before it had said who it is"
    return str(error) or type(error).__name__


class Refusals:
    """Tells of those who were sent away: each, as long as they are few; how many, if they are many. Any thread."""

    def __init__(self, what: str, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._since = -_WINDOW_S
        self._count = 0

    def tell(self, address: Any, why: str) -> None:
        """One was sent away."""
        with self._lock:
            now = self._clock()
            untold = 0
            if now - self._since >= _WINDOW_S:
                untold, self._since, self._count = max(0, self._count - _LINES), now, 0
            self._count += 1
            quiet, last = self._count > _LINES, self._count == _LINES
        if untold:
            self._say(f"{untold} more were sent away from {self._what} within a minute")
        if not quiet:
            more = "; of more within this minute only the number is told" if last else ""
            self._say(f"{name_of(address)} was sent away from {self._what}: {why}{more}")


def name_of(address: Any) -> str:
    """Return a peer's address as it is written."""
    if not isinstance(address, tuple) or len(address) < 2:
        return str(address or "somebody")
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


class Unknown(Generic[Connection]):
    """The connections that have not said yet who they are, oldest first: not more than so many. For one thread."""

    def __init__(self, most: int = MOST_UNKNOWN) -> None:
        self._most = most
        self._waiting: deque[Connection] = deque()

    def enter(self, connection: Connection) -> Connection | None:
        """One comes; return the one that has to go for it."""
        self._waiting.append(connection)
        return self._waiting.popleft() if len(self._waiting) > self._most else None

    def leave(self, connection: Connection) -> bool:
        """One has said who it is, or goes; return whether it was still waited for."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(connection)
            return True
        return False

    def all(self) -> list[Connection]:
        """Return them."""
        return list(self._waiting)


class Door:
    """Listens at a port of its own; ``welcome(connection, hello, address)`` is called, in a thread, for each peer.

    The connection is then the callee's, which closes it.
    """

    def __init__(
        self,
        what: str,
        host: str,
        token: str,
        welcome: Callable[[socket.socket, dict[str, Any], Any], None],
        say: Say,
        *,
        port: int = 0,
    ) -> None:
        """``what`` it leads to, as in "was sent away from ..."; its last word names the threads."""
        self._token = token
        self._welcome = welcome
        self._refusals = Refusals(what, say)
        self._thread_name = f"regrow-{what.split()[-1]}"
        self._lock = threading.Lock()
        self._unknown: Unknown[socket.socket] = Unknown()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name=self._thread_name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that listen, and that speak with somebody."""
        with self._lock:
            return [self._thread, *self._threads]

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self.listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_TRY_AGAIN_S)  # the caller is gone already, or no descriptors are left
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, address), name=f"{self._thread_name}-peer", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                crowded = self._unknown.enter(connection)
                self._threads.add(thread)
            if crowded is not None:
                _shut(crowded)  # its own thread notices, and closes it
            try:
                thread.start()
            except RuntimeError:  # no thread is to be had: the next one may find one
                self._forget(connection, thread)

    def _forget(self, connection: socket.socket, thread: threading.Thread) -> None:
        with self._lock:
            self._unknown.leave(connection)
            self._threads.discard(thread)
        connection.close()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        try:
            hello = self._ask(connection, address)
            if hello is None:
                connection.close()
            else:
                self._welcome(connection, hello, address)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _ask(self, connection: socket.socket, address: Any) -> dict[str, Any] | None:
        """Return what a peer says first; ``None`` if it is no peer."""
        hello, why = None, NO_TOKEN
        try:
            hello = wire.recv_hello(connection, time.monotonic() + HELLO_S)
            if hello["type"] != "hello" or not token_matches(hello.get("token"), self._token):
                hello = None
        except (OSError, EOFError) as error:
            why = reason(error)
        with self._lock:
            waited_for = self._unknown.leave(connection)
        if hello is None and not self._closed:
            self._refusals.tell(address, why if waited_for else CROWDED)
        return hello

    def stop(self) -> None:
        """Let nobody in any more. From any thread; quick."""
        with self._lock:
            self._closed = True
            for each in (self.listener, *self._unknown.all()):
                _shut(each)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Stop, and wait a moment for the threads; those that speak with a peer end when its connection does."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        self.listener.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that waits on it
