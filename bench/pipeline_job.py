"""The job that the pipeline benchmark measures: stages of an MLP under torch's 1F1B schedule, on random data.

Runs under ``regrow run`` and writes what it saw as JSON lines, one file per rank. Measures nothing that the driver has
not asked for; takes no decision about what is good.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import regrow
from mlp_job import Log

WIDTH, ROWS, MICROBATCHES = 1024, 32, 8


class _Wait(torch.autograd.Function):
    """The identity, after a while: the given time forward, twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        if not x.is_meta:
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not gradient.is_meta:
            time.sleep(2 * ctx.seconds)
        return gradient, None


class Waiting(nn.Module):
    """Takes a fixed time and no processor: what a micro-batch costs on a device of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(x, self._seconds)


def part(width: int, wait_s: float) -> nn.Module:
    """Return a stage; all are alike."""
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)]
    return nn.Sequential(*layers, *([Waiting(wait_s)] if wait_s else []))


class Trainer:
    """One stage with its optimizer, and one step of training it."""

    def __init__(self, group: dist.ProcessGroup | None, args: argparse.Namespace) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        self.build = lambda index: part(args.width, args.wait_s)
        self.model = self.build(rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        stage = PipelineStage(self.model, rank, world, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self._first, self._last = rank == 0, rank == world - 1
        self._x = torch.randn(args.rows * MICROBATCHES, args.width, generator=torch.Generator().manual_seed(1))

    def step(self) -> None:
        if self._first:
            self.schedule.step(self._x)
        elif self._last:
            self.schedule.step(target=self._x)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_synchronous(run: regrow.Run, directory: Path) -> None:
    """Let every message be on the disk before it is sent, as logging without a background thread would have it."""
    journal = run._parts.stages._journal  # type: ignore[attr-defined]
    append = journal.append
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"synchronous-{run.rank}").open("wb")

    def synchronous(generation: int, step: int, channel: object, tensor: torch.Tensor, **more: Any) -> Any:
        pin = append(generation, step, channel, tensor, **more)
        file.write(tensor.detach().contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
        return pin

    journal.append = synchronous


def slow_down(run: regrow.Run, mb_s: float) -> None:
    """Let the journal's disk take no more than this."""
    journal = run._parts.stages._journal  # type: ignore[attr-defined]
    spill = journal._spill

    def slowly(segment: Any) -> None:
        time.sleep(segment.used / 2**20 / mb_s)
        spill(segment)

    journal._spill = slowly


def resident_mb() -> float:
    """Memory that this process holds right now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def protect(run: regrow.Run, trainer: Trainer, every: int) -> None:
    run.protect(
        model=trainer.model,
        optimizer=trainer.optimizer,
        schedule=trainer.schedule,
        stage=run.rank,
        checkpoint_every=every,
        build_stage=trainer.build,
    )


def compare(run: regrow.Run, log: Log, args: argparse.Namespace) -> None:
    """Take a protected and a plain step in turn, now one first and now the other, and time each."""
    plain_group = dist.new_group(backend="gloo")
    plain, ours = Trainer(plain_group, args), Trainer(None, args)
    protect(run, ours, args.checkpoint_every)
    iterator = run.steps(args.steps)

    def protected_step() -> None:
        with next(iterator):
            ours.step()

    def timed(call: Callable[[], None]) -> float:
        dist.barrier(plain_group)
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    journal = None
    for number in range(args.steps):
        if number == 1:
            journal = run._parts.stages._journal  # type: ignore[attr-defined]
            if args.synchronous:
                make_synchronous(run, args.out)
        before = 0 if journal is None else journal.bytes_appended
        if number % 2:
            ours_s, plain_s = timed(protected_step), timed(plain.step)
        else:
            plain_s, ours_s = timed(plain.step), timed(protected_step)
        after = 0 if journal is None else journal.bytes_appended
        sides = (run.rank > 0) + (run.rank < run.world_size - 1)
        crossed = sides * MICROBATCHES * args.rows * args.width * 4
        log.write(protected_s=ours_s, plain_s=plain_s, journaled=after - before, crossed=crossed)
    for _ in iterator:
        pass
    log.write(peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def train(run: regrow.Run, log: Log, args: argparse.Namespace) -> None:
    """Train and write when each step was done; for recovery times."""
    ours = Trainer(None, args)
    protect(run, ours, args.checkpoint_every)
    for step in run.steps(args.steps):
        if step.index == 0 and args.disk_mb_s:
            slow_down(run, args.disk_mb_s)
        with step:
            ours.step()
        log.write(step=step.index, completed=step.completed, rss_mb=resident_mb())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("compare", "train"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--synchronous", action="store_true")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a micro-batch")
    parser.add_argument("--disk-mb-s", type=float, default=0.0)
    parser.add_argument("--wait-s", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = regrow.init()
    log = Log(args.out, run.rank)
    compare(run, log, args) if args.what == "compare" else train(run, log, args)


if __name__ == "__main__":
    main()
