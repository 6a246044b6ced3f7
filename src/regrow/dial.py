"""Connect to another rank, in a way that can be called off.

A host that is gone does not even refuse: a plain ``connect`` would wait for it for seconds, with a socket that no other
thread knows of and could shut. Says nothing over the connection, and keeps nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable

_LOOK_EVERY_S = 0.25


def connect(address: tuple[str, int], timeout_s: float, look: Callable[[], None]) -> socket.socket:
    """Return a blocking socket. ``look`` is asked, now and then, whether to go on, and raises if not.

    ``OSError`` if the other side cannot be reached in time. No socket stays open unless it is returned.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # it is under way
            connection.connect(address)
        answer = select.poll()
        answer.register(connection, select.POLLOUT)
        while not answer.poll(_LOOK_EVERY_S * 1000):
            look()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        connection.setblocking(True)
    except BaseException:
        connection.close()
        raise
    return connection
