"""Writes down what a process finds when it starts: the same however it was started."""

import json
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

DIFFERENT = {"REGROW_RUN_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "REGROW_AGENT", "REGROW_TOKEN", "REGROW_SCRATCH"}


class Defined:
    """Something that a process of this script's own can only find in this script."""


def pass_on(queue):
    queue.put(Defined())


def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=pass_on, args=(queue,))
    child.start()
    received = type(queue.get(timeout=60)).__name__
    child.join(60)
    handlers = {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
    own = {
        "pid": os.getpid(),
        "python's random": random.random(),
        "numpy's random": float(np.random.rand()),
        "torch's random": torch.rand(()).item(),
    }
    same = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name != "__annotations__"),
        "file": __file__,
        "name": __name__,
        "package": __package__,
        "cwd": str(Path.cwd()),
        "leads its session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "stdin": str(Path("/proc/self/fd/0").resolve()),
        "files": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if int(path.name) < 3),
        "handlers": {name: text for name, text in handlers.items() if "0x" not in text},
        "environment": {
            name: value for name, value in os.environ.items() if name not in DIFFERENT and "ERROR_FILE" not in name
        },
        "threads of torch": torch.get_num_threads(),
        "umask": Path("/proc/self/status").read_text().split("Umask:")[1].split()[0],
        "received": received,
        "unbuffered": sys.stdout.write_through,
    }
    Path(sys.argv[1], f"facts{os.environ['RANK']}.json").write_text(json.dumps({"same": same, "own": own}))


if __name__ == "__main__":
    main()
