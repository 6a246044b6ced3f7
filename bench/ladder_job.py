"""The job that the benchmark of the ladder measures: a model of some kind whose steps take a fixed time.

Runs under ``regrow run`` and writes when each step was done as JSON lines, one file per rank. At one step some ranks
take away what the driver does not want to survive, and are killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import regrow
from mlp_job import Log
from pipeline_job import Waiting

WIDTH, DEPTH, ROWS, MICROBATCHES = 384, 4, 8, 4
WITHIN_S = 30.0


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)))


def until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WITHIN_S:.0f} s for {what}")
        time.sleep(0.002)


class Strike:
    """Kills some ranks at one moment, when all that is to survive is where it belongs, and the rest is gone."""

    def __init__(self, run: Any, log: Log, args: argparse.Namespace) -> None:
        self._run = run
        self._log = log
        self._args = args
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"pid{run.rank}").write_text(str(os.getpid()))

    def at(self, step: int) -> None:
        run, args = self._run, self._args
        if step != args.at or run.rank not in args.die or run.generation > 0:
            return
        self._settle()
        self._take_away()
        (args.out / f"dying{run.rank}").touch()
        until(lambda: len(list(args.out.glob("dying*"))) == len(args.die), "the others that are to die")
        if run.rank != min(args.die):
            signal.pause()
        self._log.write(died=True)
        for rank in sorted(args.die, reverse=True):  # the own one last
            os.kill(int((args.out / f"pid{rank}").read_text()), signal.SIGKILL)

    def _settle(self) -> None:
        run = self._run
        if run._parts.disk is not None:
            until(lambda: run._parts.disk._last is not None, "a checkpoint on storage")
        if run._parts.snapshots is not None:
            run._parts.snapshots.settle()
            until(lambda: run._parts.snapshots._task.over.is_set(), "a snapshot that everyone has")
        if run._parts.stages is not None:
            newest = (self._args.at - 1) // self._args.checkpoint_every * self._args.checkpoint_every
            until(lambda: run._parts.stages.checkpoints.last_committed == newest, f"the checkpoints of step {newest}")

    def _take_away(self) -> None:
        run, without = self._run, self._args.without
        if "memory" in without:
            run._shelf.remove()
        if run._parts.stages is not None and "rollback" in without:
            mine = run._parts.stages.checkpoints._directory
            for path in mine.parent.glob("rank*/step-*.state"):
                if path.parent != mine or "replay" in without:
                    path.unlink()


def train(run: Any, log: Log, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
    extras: dict[str, Any] = {}
    model: nn.Module = layers()
    if args.kind == "ddp":
        model = DistributedDataParallel(model)
    elif args.kind == "pipeline":
        model.append(Waiting(args.step_s / (3 * MICROBATCHES)))  # three times of that forward and backward
        stage = PipelineStage(model, run.rank, run.world_size, torch.device("cpu"))
        extras["schedule"] = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        extras |= {"stage": run.rank, "checkpoint_every": args.checkpoint_every}
    else:
        shape = (2, run.world_size // 2) if args.kind == "hsdp" else (run.world_size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.protect(model=model, optimizer=optimizer, **extras)
    strike = Strike(run, log, args)
    for step in run.steps(args.steps):
        with step:
            strike.at(step.index)
            if args.kind == "pipeline":
                schedule = extras["schedule"]
                first, last = run.rank == 0, run.rank == run.world_size - 1
                schedule.step(*([x] if first else []), **({"target": x} if last else {}))
            else:
                time.sleep(args.step_s)
                model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        log.write(step=step.index, completed=step.completed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("ddp", "fsdp", "hsdp", "pipeline"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--at", type=int, required=True, help="the step in which ranks die")
    parser.add_argument("--die", type=int, nargs="+", required=True)
    parser.add_argument("--without", nargs="*", default=[], help="what is taken away before")
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = regrow.init()
    train(run, Log(args.out, run.rank), args)


if __name__ == "__main__":
    main()
