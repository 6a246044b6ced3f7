"""A process that has loaded what every worker loads, and that a worker is forked from within a moment.

The agent starts this file as a script. It imports PyTorch, says so, and then forks a worker for every request that it
reads from a socket. A worker is what ``python script.py`` would have made of it, only sooner: a session of its own, its
own environment, arguments and streams, a ``__main__`` with nothing in it but the script. It is forked twice, so that it
is the agent's child and not this process's: whatever happens here then, workers live on.

Forking is safe as long as there is one thread. Importing PyTorch starts none that would mind; where something else does
(a plugin that is loaded with it), this process says so and ends, and workers are started the long way.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the directory of this file: what lies there is not to be found under the names of other modules

import builtins
import ctypes
import gc
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import struct
import time
import types
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1
_ADOPTED_S = 5.0


def main() -> None:
    """Load, say so, and fork whenever asked; in a worker, return when its script has ended."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    load()
    _end_threads_that_know_of_forks()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        send(connection, {"problem": f"importing torch started {threads - 1} threads"})
        return
    send(connection, {"ready": True})
    while True:
        try:
            request, streams = receive(connection)
        except EOFError:  # the agent has ended
            return
        try:
            pid = fork_twice()
        except OSError as error:
            send(connection, {"problem": f"cannot fork: {error}"})
            return
        if pid == 0:
            connection.close()
            break
        for stream in streams:
            os.close(stream)
        send(connection, {"pid": pid})
    become(request, streams)
    run_script(request["argv"], module=request["module"])


def load() -> None:
    """Import what a training script is going to import."""
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    import regrow

    for name in regrow.__all__:  # each is loaded when it is first asked for
        getattr(regrow, name)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))])  # the first optimizer imports as much as torch itself
    gc.collect()
    gc.freeze()  # what is not looked at again stays shared between the workers


def _end_threads_that_know_of_forks() -> None:
    """Fork once for nothing: OpenBLAS, for one, ends its threads before a fork and starts them when they are needed."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


# the socket ----------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: dict[str, Any], streams: list[int] | None = None) -> None:
    """Send one message, and file descriptors with it."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], streams or [])
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return one message and the file descriptors that came with it; ``EOFError`` if the other end is closed."""
    head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 2)
    head += _exactly(connection, LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError
    message = json.loads(_exactly(connection, LENGTH.unpack(head)[0]))
    return message, list(streams)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


# the worker ----------------------------------------------------------------------------------------------------------


def fork_twice() -> int:
    """Fork a process that is not this one's child; return its id, and 0 in it."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    os.waitpid(between, 0)
    told = os.read(reading, 32)
    os.close(reading)
    if not told:
        raise OSError("the second fork failed")
    return int(told)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Take on what makes a process this worker: parent, session, streams, environment, directory, random numbers."""
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != request["agent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["agent"]:  # it died before the prctl: nobody would kill us any more
        os._exit(1)
    os.setsid()
    for number, stream in zip(request["streams"], streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    sys.orig_argv = request["command"]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    # generators that were seeded by chance when they were made, which is now past; Python's own is seeded by each fork
    sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def run_script(argv: list[str], *, module: bool) -> None:
    """Run a script, or a module, as the interpreter would if it had been started with it."""
    sys.argv = list(argv)
    path = Path(argv[0])
    home = Path.cwd() if module else path.resolve().parent
    if not sys.flags.safe_path and (module or path.is_file()):
        sys.path.insert(0, str(home))
    try:
        if module:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        elif path.is_file() and path.suffix not in (".zip", ".pyz"):
            _run_file(path)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except Exception as error:  # noqa: BLE001  it is the script's, and is told as if there were no caller of the script
        error.__traceback__ = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _run_file(path: Path) -> None:
    file = str(path.absolute())
    code = compile(path.read_bytes(), file, "exec")
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    place = vars(sys.modules["__main__"])  # the very module: multiprocessing knows it by another name, too
    place.clear()
    place.update(__name__="__main__", __doc__=None, __package__=None, __loader__=loader, __spec__=None)
    place.update(__annotations__={}, __builtins__=builtins, __file__=file, __cached__=None)
    exec(code, place)


def _of_the_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Leave out the frames of those who called the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    from regrow.agent import template

    template.main()  # not main(): what is running must not lie in the module that becomes the script's
