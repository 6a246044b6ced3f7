"""A small job with everything that makes equality hard: dropout, batch norm, a scheduler, augmentation."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import regrow
from host import linger, lose_host
from regrow import state_digest


class Noisy(Dataset):
    """Samples with augmentation that draws from all three random generators."""

    def __init__(self, count: int = 203, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, width, generator=generator)
        self.y = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(self.x.shape[1]) * 0.01 + random.random() * 0.01 + float(np.random.rand()) * 0.01
        return self.x[index] + noise, self.y[index]


class Fork(nn.Module):
    """Two branches, taken in an order that depends on the rank: so do their gradients come."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in "ab"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        swapped = dist.get_rank() % 2
        first = self.branches[swapped](x)
        return first + self.branches[1 - swapped](x)


def net(width: int, depth: int, forked: bool, batch_norm: bool) -> nn.Module:
    norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
    layers: list[nn.Module] = [nn.Linear(16, width), norm]
    if forked:
        layers.append(Fork(width))
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def optimizer_of(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    match name:
        case "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4)
        case "adam":
            return torch.optim.Adam(params, lr=1e-3)
        case "adamw":
            return torch.optim.AdamW(params, lr=1e-3)
        case _:
            return torch.optim.LBFGS(params)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--wait-free", action="store_true")
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--fork", action="store_true", help="gradients come in another order on odd ranks")
    parser.add_argument("--layer-norm", action="store_true", help="a batch may have one sample")
    parser.add_argument("--bucket-mb", type=float, default=0.02)
    parser.add_argument("--ddp", nargs="*", default=[], help="options of DistributedDataParallel to switch on")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--sync-all", action="store_true", help="reduce in every backward, not in the last one only")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--dump-at", type=int, nargs="*", default=[], help="save the state at the start of these steps")
    parser.add_argument("--nothing", action="store_true", help="protect nothing")
    parser.add_argument("--sever-at", type=int, default=-1, help="rank 0 loses its connections, nobody dies")
    parser.add_argument("--bare", action="store_true", help="no dropout, no batch norm, no loader")
    parser.add_argument("--tail", action="store_true", help="a collective after the update")
    parser.add_argument("--meet-after", type=int, default=-1, help="all ranks wait until all have done this step")
    parser.add_argument(
        "--linger", type=int, nargs="*", default=[], help="ranks that hear of a loss when they have met"
    )
    parser.add_argument("--unwaited", action="store_true", help="end with collectives that nobody has waited for")
    parser.add_argument("--idle-at", type=int, default=-1, help="no update in this step")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--raise-rank", type=int, default=1)
    parser.add_argument("--lose-host", type=int, nargs=2, metavar=("RANK", "STEP"), help="kill this rank's agent there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    faulthandler.register(signal.SIGWINCH)  # the harness asks where everyone stands when a job is late
    run = regrow.init()
    torch.manual_seed(100 + run.rank)
    random.seed(run.rank)
    np.random.seed(run.rank)
    hello = [None] * run.world_size
    dist.all_gather_object(hello, f"rank {run.rank}")
    assert hello == [f"rank {r}" for r in range(run.world_size)]
    pair = dist.new_group(list(range(run.world_size)))
    count = torch.ones(1)
    dist.all_reduce(count, group=pair)
    assert count.item() == run.world_size
    dist.barrier()

    bare = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    inner = bare if args.bare else net(args.width, args.depth, args.fork, not args.layer_norm)
    model = DistributedDataParallel(inner, bucket_cap_mb=args.bucket_mb, **dict.fromkeys(args.ddp, True))
    opt = optimizer_of(args.optimizer, list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=args.workers)
    extras: dict[str, object] = {}
    scaler = torch.amp.GradScaler("cpu", enabled=args.scaler)
    if args.scaler:
        extras["scaler"] = scaler
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if args.ema else None
    if ema is not None:
        extras["ema"] = ema
    if not args.bare:
        extras["loader"] = loader
    if args.nothing:
        next(run.steps(1))
    run.protect(
        model=model,
        optimizer=opt,
        scheduler=scheduler,
        wait_free=args.wait_free,
        exact=not args.inexact,
        **extras,
    )
    loss_fn = nn.CrossEntropyLoss()
    losses: dict[int, float] = {}
    attempts: list[tuple[int, bool]] = []
    for step in run.steps(args.steps):
        with step:
            linger(step.index, args.steps - 1)
            if step.index == args.raise_at and run.rank == args.raise_rank:
                raise ValueError("this script has a bug")
            if step.index in args.dump_at:
                args.out.mkdir(parents=True, exist_ok=True)
                state = {"params": [p.detach() for p in model.parameters()], "optimizer": opt.state_dict()["state"]}
                torch.save(state, args.out / f"step{step.index}.rank{run.rank}.pt")
            if step.index == args.sever_at and run.rank == 0 and step.attempt == 0:
                run._fabric.abort("a cable was pulled")
            if args.lose_host == [run.rank, step.index] and run.generation == 0:
                lose_host()
            opt.zero_grad()
            total = 0.0
            fixed = [(torch.ones(4, 16), torch.arange(4))]
            for i, (x, y) in enumerate(fixed if args.bare else step.batches(args.accumulate)):
                last = args.sync_all or i == args.accumulate - 1
                with model.no_sync() if not last else torch.enable_grad():
                    loss = loss_fn(model(x), y) / args.accumulate
                    scaler.scale(loss).backward()
                total += loss.item()
            if args.clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if step.index != args.idle_at:
                scaler.step(opt)
                scaler.update()
            scheduler.step()
            if ema is not None:
                ema.update_parameters(model.module)
            losses[step.index] = total
            if args.tail:
                mean = torch.tensor([total])
                dist.all_reduce(mean)
                losses[step.index] = mean.item()
        attempts.append((step.index, step.completed))
        if step.index == args.meet_after and not args.out.joinpath(f"met{run.rank}").exists():
            args.out.mkdir(parents=True, exist_ok=True)
            args.out.joinpath(f"met{run.rank}").touch()
            wait_until(lambda: len(list(args.out.glob("met*"))) == run.world_size)
            if run.rank in args.linger:
                wait_until(lambda: run._link.generation != run.generation)
    objects = [model, opt, scheduler.state_dict(), *([ema] if ema is not None else []), {"rng": torch.get_rng_state()}]
    report = {
        "rank": run.rank,
        "digest": state_digest(*objects),
        "weights": state_digest(*model.parameters()),
        "losses": losses,
        "attempts": attempts,
        "pid": os.getpid(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rank{run.rank}.json").write_text(json.dumps(report))
    if args.unwaited:
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            for _ in range(30):
                dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True)
        return
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
