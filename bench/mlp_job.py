"""The job that the data-parallel benchmark measures: an MLP of about 10M parameters with Adam, on random data.

Runs under ``regrow run``, ``torchrun`` or alone, and writes what it saw as JSON lines, one file per rank. Measures
nothing that the driver has not asked for; takes no decision about what is good.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

WIDTH, DEPTH, BATCH = 1024, 10, 64


def mlp() -> nn.Module:
    """Return about 10.5M parameters."""
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class Trainer:
    """One model with its optimizer, and one step of training it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(mlp(), process_group=group)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(BATCH, WIDTH, generator=generator)

    def step(self) -> None:
        """Forward, backward, update."""
        self.model(self.x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Log:
    """One JSON line per fact, in a file of this rank, flushed at once since the process may be killed."""

    def __init__(self, out: Path, rank: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = (out / f"rank{rank}.jsonl").open("a")

    def write(self, **fact: Any) -> None:
        """Write one fact."""
        self._file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **fact}) + "\n")
        self._file.flush()


def compare(run: regrow.Run, log: Log, args: argparse.Namespace) -> None:
    """Take a protected and a plain step in turn, now one first and now the other, and time each.

    With ``--null`` the one that stands for the protected is plain, too: what is found then is the measurement's own.
    """
    plain_group = dist.new_group(backend="gloo")
    other_group = dist.new_group(backend="gloo") if args.null else None
    if args.plain_first:
        plain, other = Trainer(plain_group), Trainer(other_group)
    else:
        other, plain = Trainer(other_group), Trainer(plain_group)
    other_step, end = other.step, lambda: None
    if not args.null:
        run.protect(model=other.model, optimizer=other.optimizer, wait_free=args.wait_free, exact=not args.inexact)
        iterator = run.steps(args.steps)

        def other_step() -> None:
            with next(iterator):
                other.step()

        def end() -> None:
            for _ in iterator:  # there is none left: this ends the run in good order
                pass

    def timed(call: Callable[[], None]) -> float:
        dist.barrier(plain_group)
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    for number in range(args.steps):
        if number % 2:
            other_s, plain_s = timed(other_step), timed(plain.step)
        else:
            plain_s, other_s = timed(plain.step), timed(other_step)
        log.write(protected_s=other_s, plain_s=plain_s)
    end()


def train(run: regrow.Run, log: Log, args: argparse.Namespace) -> None:
    """Train and write when each step was done; for recovery times and peak memory."""
    trainer = Trainer()
    checkpoint = args.out / "checkpoint.pt"
    first = 0
    if args.checkpoint_at and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    run.protect(model=trainer.model, optimizer=trainer.optimizer, wait_free=args.wait_free, exact=not args.inexact)
    for step in run.steps(args.steps - first):
        with step:
            began = time.perf_counter()
            trainer.step()
        log.write(step=step.index + first, step_s=time.perf_counter() - began, completed=step.completed)
        if step.index + first + 1 == args.checkpoint_at and run.rank == 0 and first == 0:
            state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
            torch.save({**state, "step": args.checkpoint_at}, args.out / "checkpoint.tmp")
            (args.out / "checkpoint.tmp").rename(checkpoint)
    log.write(peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def bandwidth(log: Log, rounds: int, megabytes: float) -> None:
    """Measure what gloo moves from rank 0 to rank 1 in one message, memory already touched."""
    tensor = torch.zeros(int(megabytes * (1 << 20)), dtype=torch.uint8)
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
            log.write(gloo_gb_s=tensor.numel() / (time.perf_counter() - began) / 1e9)


def main() -> None:
    """Do what the driver asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("compare", "train", "bandwidth"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--wait-free", action="store_true")
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--null", action="store_true")
    parser.add_argument("--plain-first", action="store_true")
    parser.add_argument("--checkpoint-at", type=int, default=0)
    parser.add_argument("--megabytes", type=float, default=120)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = regrow.init()
    log = Log(args.out, run.rank)
    match args.what:
        case "compare":
            compare(run, log, args)
        case "train":
            train(run, log, args)
        case "bandwidth":
            bandwidth(log, args.steps, args.megabytes)


if __name__ == "__main__":
    main()
