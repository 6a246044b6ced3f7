"""The job that the benchmark of snapshots measures: a sharded MLP with AdamW, on random data, over a slow network.

Runs under ``regrow run`` on several hosts and writes what it saw as JSON lines, one file per rank. Some steps take a
snapshot as ever, some none, some take it as one would without any care: those modes are made here, not in the product.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import regrow
from mlp_job import Log
from pipeline_job import Waiting

WIDTH, DEPTH = 1024, 2
MODES = ("none", "scheduled", "blocking", "none", "scheduled", "unscheduled")
"""In this order, again and again, so many steps each."""
BLOCK = 6
WARM_UP = 12
"""Steps before the first block: the profile of the network's idle spans is made of them."""


def mode_of(step: int) -> str:
    return "scheduled" if step < WARM_UP else MODES[(step - WARM_UP) // BLOCK % len(MODES)]


class Modes:
    """Stands before a run's snapshots, and takes them in the way that is up."""

    def __init__(self, run: regrow.Run) -> None:
        self._snapshots = run._parts.snapshots  # type: ignore[attr-defined]
        self._begin = self._snapshots.begin
        self._paced = self._snapshots._pacer.pace
        self._snapshots.begin = self.begin

    def begin(self, step: int, small: object) -> None:
        mode, before = mode_of(step), mode_of(max(step - 1, 0))
        pacer = self._snapshots._pacer
        if mode != before:
            self.drain()
        if mode == "none":
            pacer.turn()
            return
        pacer.pace = self._paced if mode == "scheduled" else lambda connection, left: left
        self._begin(step, small)
        if mode == "blocking":
            self.drain()

    def drain(self) -> None:
        """Wait until the last snapshot is where it belongs."""
        if self._snapshots._task is not None and not self._snapshots._task.over.wait(120):
            raise TimeoutError("a snapshot was not sent within two minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--wait-s", type=float, default=0.0, help="so long a block computes on a device of its own")
    parser.add_argument("--modes", action="store_true", help="take snapshots now in this way and now in that")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = regrow.init()
    torch.manual_seed(0)
    waiting = [Waiting(args.wait_s)] if args.wait_s else []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), *waiting) for _ in range(DEPTH)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.protect(model=model, optimizer=optimizer)
    x = torch.randn(args.rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    log = Log(args.out, run.rank)
    modes = None
    for step in run.steps(args.steps):
        if modes is None and args.modes:
            modes = Modes(run)
        with step:
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        log.write(step=step.index, completed=step.completed)


if __name__ == "__main__":
    main()
