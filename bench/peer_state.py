"""How fast a rank's state comes back: from its own host's memory, from another host's, from a disk.

``keep`` runs on the other host: the keeper that an agent has, and a bare sender for comparison. ``measure`` runs on
this one, with the code that a recovery uses, and prints a JSON line per round. Everything is read into tensors that
were touched before, as those of a spare are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from regrow.ids import Step
from regrow.peer.client import Client
from regrow.peer.keeper import Keeper, fill
from regrow.peer.memory import Buffer
from regrow.run import taking
from regrow.state import image
from regrow.state.registry import Registry

TOKEN = "bench"
TENSORS = 24
STEP = Step(0)
PAIRS = 5


def registry_of(nbytes: int) -> Registry:
    """Return a model whose parameters and AdamW's state have so many bytes, as after an update."""
    sizes = [nbytes // 12 // TENSORS] * TENSORS
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    registry = Registry()
    registry.add({"model": model, "optimizer": optimizer})
    return registry


def install(buffer: Buffer, registry: Registry) -> None:
    image.assemble(*buffer.read("the snapshot"), "the snapshot").install(registry)


def keep(home: Path, address: str, nbytes: int) -> None:
    """Keep snapshots, and send as many bytes as one has to whoever connects to the other port; until stdin ends."""
    keeper = Keeper(home / "kept", address, TOKEN, lambda text: print(text, file=sys.stderr))
    raw = home / "raw"
    raw.write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
    listener = socket.create_server((address, 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, raw.open("rb") as file:
                connection.sendfile(file)

    threading.Thread(target=serve, name="raw", daemon=True).start()
    print(json.dumps([keeper.address, listener.getsockname()[:2]]), flush=True)
    sys.stdin.read()
    keeper.close()


def timed(call) -> float:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(home: Path, disk: Path, keeper: tuple[str, int], raw: tuple[str, int], nbytes: int, rounds: int) -> None:
    registry = registry_of(nbytes)
    (model,), (optimizer,) = registry.modules.values(), registry.optimizers.values()
    own = Buffer(home / "own")
    layout = taking.write(own, registry, STEP, image.Small(b"own", b"shared", [], []), {"generation": 0, "line": []})
    size = sum(layout.sizes)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    room = memoryview(bytearray(b"x") * (nbytes >> 20 << 20))
    client = Client(keeper, TOKEN, lambda: None)
    index, _ = own.read("the snapshot")
    client.put(0, 0, own, layout, index)
    checkpoint = disk / "checkpoint.pt"

    def over_the_link() -> None:
        with socket.create_connection(raw) as connection:
            fill(connection, room)

    def from_a_peer() -> None:
        fetched = Buffer(home / "fetched")
        client.get(0, STEP, fetched)
        install(fetched, registry)
        fetched.remove()

    def to_disk() -> None:
        with checkpoint.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def from_disk() -> None:
        found = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    for _ in range(rounds):
        pairs = [
            (timed(lambda: target.copy_(source)), timed(lambda: install(Buffer(home / "own"), registry)))
            for _ in range(PAIRS)
        ]
        fact = {
            "memcpy_s": statistics.median(memcpy_s for memcpy_s, _ in pairs),
            "own_s": statistics.median(own_s for _, own_s in pairs),
            "link_s": timed(over_the_link) * size / len(room),
            "peer_s": timed(from_a_peer),
            "save_s": timed(to_disk),
            "load_s": timed(from_disk),
        }
        print(json.dumps(fact), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("keep", "measure"))
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--keeper", help="what keep has printed")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix="regrow-bench-", dir="/dev/shm"))
    try:
        if args.what == "keep":
            keep(home, args.address, args.bytes)
        else:
            keeper, raw = (tuple(address) for address in json.loads(args.keeper))
            with tempfile.TemporaryDirectory(prefix="regrow-bench-") as disk:
                measure(home, Path(disk), keeper, raw, args.bytes, args.rounds)
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
