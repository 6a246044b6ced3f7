"""Find, watch, tune and sever exactly the TCP sockets of one generation of gloo groups.

gloo gives no way to cancel an operation, but its connections are descriptors of this process. They are recognised by
their names: a connection that was accepted has our own listener's address, one that we opened leads to a peer's
listener. Never touches any other socket (the store's, the user's, another generation's): a descriptor is duplicated
first, which pins what it refers to, and is compared afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Address = tuple[str, int]
"""Numeric host and port, as ``getsockname`` begins with."""

_ESTABLISHED = 1
_SIZE = struct.Struct("=Q")
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
"""A program for the kernel's packet filter, of one instruction: take 0 bytes of each packet."""
_NOTHING_PASSES = struct.pack("@HP", 1, ctypes.addressof(_RETURN_NOTHING))


@dataclass(frozen=True)
class Names:
    """The listeners that name a generation's sockets: ours, and those of the peers heard of so far."""

    own: frozenset[Address] = frozenset()
    peers: frozenset[Address] = frozenset()

    def match(self, local: Address, remote: Address | None) -> bool:
        """Whether a socket between these addresses belongs to the generation."""
        return local in self.own or (remote is not None and remote in self.peers)


@dataclass(frozen=True)
class Connection:
    """One descriptor as it was seen: the inode tells whether the number has been reused since."""

    fd: int
    inode: int
    listening: bool


def parse_listener(blob: bytes) -> Address:
    """Return the listening address in what gloo publishes about a rank: host name, addresses, each after its length."""
    try:
        (name_len,) = _SIZE.unpack_from(blob, 0)
        start = _SIZE.size + name_len + _SIZE.size
        (family,) = struct.unpack_from("=H", blob, start)
        (port,) = struct.unpack_from("!H", blob, start + 2)
        if family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, blob[start + 4 : start + 8]), port
        if family == socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, blob[start + 8 : start + 24]), port
    except (struct.error, ValueError, OverflowError) as error:
        raise ValueError(f"not the address of a gloo rank: {error}") from None
    raise ValueError(f"not the address of a gloo rank: address family {family}")


@contextlib.contextmanager
def _pinned(fd: int) -> Iterator[socket.socket | None]:
    """Duplicate a descriptor, so that what it refers to stays the same while it is looked at. ``None`` if not TCP."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    try:
        tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        yield sock if tcp else None
    finally:
        sock.close()


def _matches(sock: socket.socket, names: Names) -> bool:
    try:
        local = sock.getsockname()[:2]
    except OSError:
        return False
    try:
        remote = sock.getpeername()[:2]
    except OSError:  # a listener, or a connection that the peer has reset
        remote = None
    return names.match(local, remote)


def _socket_fds() -> list[int]:
    found = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names only; this runs between a failure and the wake-up)
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):  # noqa: PTH115
                found.append(int(entry))
        except OSError:
            continue
    return found


def find(names: Names) -> list[Connection]:
    """Return the generation's descriptors in this process."""
    found = []
    for fd in _socket_fds():
        with _pinned(fd) as sock:
            if sock is not None and _matches(sock, names):
                listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                found.append(Connection(fd, os.fstat(sock.fileno()).st_ino, listening))
    return found


def sever(names: Names) -> int:
    """Shut the generation's connections down in both directions, which wakes whoever waits on them; return how many.

    Not the listener: gloo's event loop does not expect one to end.
    """
    severed = 0
    for fd in _socket_fds():
        with _pinned(fd) as sock:
            if sock is None or not _matches(sock, names) or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            with contextlib.suppress(OSError):  # already reset by the peer: gloo has been told
                sock.shutdown(socket.SHUT_RDWR)
                severed += 1
    return severed


def sever_these(connections: Iterable[Connection]) -> None:
    """Shut single connections down, if they are still the ones that were seen."""
    for connection in connections:
        with _pinned(connection.fd) as sock, contextlib.suppress(OSError):
            if sock is not None and os.fstat(sock.fileno()).st_ino == connection.inode:
                sock.shutdown(socket.SHUT_RDWR)


def tune(connections: Iterable[Connection], user_timeout_s: float) -> None:
    """Let the kernel notice a peer that vanished without a word, and keep the descriptors out of executed programs."""
    seconds = max(2, int(user_timeout_s))
    for connection in connections:
        with _pinned(connection.fd) as sock, contextlib.suppress(OSError):
            if sock is None or os.fstat(sock.fileno()).st_ino != connection.inode:
                continue
            os.set_inheritable(connection.fd, False)
            if connection.listening:
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, seconds - 1))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))


def bar(connections: Iterable[Connection]) -> None:
    """Let the kernel drop whatever comes to these listeners from now on; what was accepted before is not concerned.

    gloo asks nobody for a token, keeps the descriptor of whoever connects, and ends the process when it has no more of
    them. It cannot be told to listen no longer, and does not expect its listener to end. A filter of the socket that
    lets nothing through is none of its business.
    """
    for connection in connections:
        _filter(connection, _SO_ATTACH_FILTER, _NOTHING_PASSES)


def unbar(connections: Iterable[Connection]) -> None:
    """Let these listeners be reached again."""
    for connection in connections:
        _filter(connection, _SO_DETACH_FILTER, struct.pack("=i", 0))


def _filter(connection: Connection, option: int, value: bytes) -> None:
    with _pinned(connection.fd) as sock, contextlib.suppress(OSError):  # not barred, or a kernel without filters
        if sock is not None and connection.listening and os.fstat(sock.fileno()).st_ino == connection.inode:
            sock.setsockopt(socket.SOL_SOCKET, option, value)


def is_up(connection: Connection) -> bool:
    """Whether a connection is still the one that was seen, and neither side has ended it."""
    with _pinned(connection.fd) as sock:
        if sock is None:
            return False
        try:
            if os.fstat(sock.fileno()).st_ino != connection.inode:
                return False
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        except OSError:
            return False


def unsent(connection: Connection) -> int:
    """Return how many bytes the other side of a connection has not yet confirmed."""
    with _pinned(connection.fd) as sock, contextlib.suppress(OSError):
        if sock is not None and os.fstat(sock.fileno()).st_ino == connection.inode:
            return outgoing(sock)
    return 0


def outgoing(sock: socket.socket) -> int:
    """Return how many bytes are in the kernel's hands or on their way."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    return int(count)


def blank(names: Names) -> int:
    """In a forked child: put /dev/null in the place of the inherited sockets; return how many.

    Otherwise the child keeps the connections of a killed parent open, and the peers wait for it. They are not shut
    down, which would end the parent's too.
    """
    count = 0
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for connection in find(names):
            os.dup2(null, connection.fd, inheritable=False)
            count += 1
    finally:
        os.close(null)
    return count
