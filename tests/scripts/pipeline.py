"""A small pipeline, by torch's schedules or by hand, with dropout and a learning rate that moves."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow
from host import linger

CLASSES = 4


def part(index: int, count: int, width: int, norm: str = "batch") -> nn.Module:
    out = CLASSES if index == count - 1 else width
    between = {"batch": nn.BatchNorm1d(32), "layer": nn.LayerNorm(32), "none": nn.RReLU()}[norm]
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Dropout(0.2), between, nn.Linear(32, out))


class ByHand:
    """All micro-batches forward, then all backward, with blocking messages."""

    def __init__(self, module: nn.Module, place: int, ranks: list[int], microbatches: int, loss_fn: nn.Module) -> None:
        self._module = module
        self._microbatches = microbatches
        self._loss_fn = loss_fn
        self._before = ranks[place - 1] if place else None
        self._after = ranks[place + 1] if place + 1 < len(ranks) else None

    def step(self, x: torch.Tensor | None = None, target: torch.Tensor | None = None, losses: list | None = None):
        kept = []
        for number in range(self._microbatches):
            if self._before is None:
                given = x.chunk(self._microbatches)[number]
            else:
                shape = torch.zeros(2, dtype=torch.int64)
                dist.recv(shape, self._before)
                given = torch.zeros(*shape.tolist())
                dist.recv(given, self._before, tag=7)
                given.requires_grad_()
            out = self._module(given)
            if self._after is None:
                out = self._loss_fn(out, target.chunk(self._microbatches)[number])
                losses.append(out.detach())
                out = out / self._microbatches
            else:
                dist.send(torch.tensor(out.shape), self._after)
                dist.send(out.detach(), self._after, tag=7)
            kept.append((given, out))
        for given, out in kept:
            grad = None
            if self._after is not None:
                grad = torch.zeros_like(out)
                dist.recv(grad, self._after)
            out.backward(grad)
            if self._before is not None:
                dist.send(given.grad, self._before)


class Backward(torch.autograd.Function):
    """ReLU, but for a little in its backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        out = x.relu()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return gradient * (out > 0) * 1.001


def relu(function) -> nn.Module:
    """Return a part that goes by the name of ReLU."""
    return type("ReLU", (nn.Module,), {"forward": lambda self, x: function(x)})()


def no_forward(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not on this rank")


def build(how: str, rank: int, module: nn.Module) -> nn.Module:
    """Return a stage for another rank's replay; rank 0 may get it wrong, and once rank 2, too."""
    if rank == 0 and how == "raises":
        raise ValueError("no such stage here")
    if rank == 0 and how == "smaller":
        return nn.Linear(2, 2)
    if rank == 0 and how == "otherwise":
        module[1] = nn.GELU()
    if rank == 0 and how == "elsewhere":
        module[2].p = 0.3  # the same parts, another function
    if rank == 0 and how == "unlike":
        module[1] = relu(Backward.apply)
    if rank == 2 and how == "unlike":
        module[1] = relu(no_forward)
    return module


def damage(what: str, run: regrow.Run) -> None:
    """Flip a bit where rank 1 will look for it: in its own checkpoint of step 5, or in what it was sent in step 6."""
    if what == "checkpoint":
        deadline = time.monotonic() + 30
        while not (found := list(Path(os.environ["REGROW_SCRATCH"]).glob("regrow-*/rank1/step-5.state"))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raw = bytearray(found[0].read_bytes())
        raw[-5] ^= 1
        found[0].write_bytes(raw)
    else:
        journal = run._parts.stages._journal
        assert journal.read(6, 1)  # by then it has its checksum
        entry = next(rows[0] for channel, rows in journal._index[6].items() if channel.peer == 1)
        entry.segment.memory[entry.start + entry.length - 64] ^= 1


def die_together(out: Path, rank: int, count: int) -> None:
    """End by SIGKILL as soon as all that are to are here; a replacement goes on."""
    out.mkdir(parents=True, exist_ok=True)
    mark = out / f"dying{rank}"
    if mark.exists():
        return
    mark.touch()
    deadline = time.monotonic() + 30
    while len(list(out.glob("dying*"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def until_committed(run: regrow.Run, step: int) -> None:
    """Wait until every rank has its part of a checkpoint, or somebody has died of it."""
    deadline = time.monotonic() + 60
    while (run._parts.stages.checkpoints.last_committed or 0) < step and run._link.generation == run.generation:
        assert time.monotonic() < deadline, f"the checkpoint of step {step} is not committed"
        time.sleep(0.001)


def values(model: nn.Module) -> list[float]:
    """Return all parameters, if they are few: some tests have small disks."""
    whole = torch.cat([param.detach().flatten() for param in model.parameters()])
    return whole.tolist() if len(whole) < 10_000 else []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--mean", action="store_true", help="the last stage tells all others the loss")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--damage", choices=["checkpoint", "journal"], help="flip a bit of it at the start of step 8")
    parser.add_argument("--die", type=int, nargs="+", default=[], help="a step, and ranks that die in it at once")
    parser.add_argument("--share", nargs="?", const="right", help="let idle ranks help with a replay; or badly")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--noisy-loss", action="store_true")
    parser.add_argument("--twice", action="store_true", help="run the schedule twice in each step")
    parser.add_argument("--norm", choices=["batch", "layer", "none"], default="batch")
    parser.add_argument(
        "--commit-first", action="store_true", help="end no interval before its checkpoint is committed"
    )
    parser.add_argument("--slow-s", type=float, default=0.0)
    parser.add_argument("--approximate", action="store_true")
    parser.add_argument("--lose", type=int, nargs=2, help="a step, and a rank that dies in it with its checkpoints")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGWINCH)
    run = regrow.init()
    length = run.world_size // args.replicas
    replica, place = divmod(run.rank, length)
    lines = [dist.new_group(list(range(r * length, (r + 1) * length))) for r in range(args.replicas)]
    twins = [dist.new_group(list(range(p, run.world_size, length))) for p in range(length)]
    line, ranks = lines[replica], list(range(replica * length, (replica + 1) * length))
    several = args.schedule == "interleaved"
    count = 2 * length if several else length
    indices = [place, place + length] if several else [place]
    torch.manual_seed(10)
    modules = [part(index, count, args.width, args.norm) for index in range(count)]
    modules = [modules[index] for index in indices]
    if args.replicas > 1:
        modules = [DistributedDataParallel(module, process_group=twins[place]) for module in modules]
    torch.manual_seed(100 + run.rank)
    model = nn.ModuleList(modules)
    if args.share == "unhooked":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if args.optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loss_fn = nn.CrossEntropyLoss()
    if args.noisy_loss:
        loss_fn = lambda out, y: nn.functional.cross_entropy(out + 0.01 * torch.randn_like(out), y)  # noqa: E731
    if args.schedule == "hand":
        schedule = ByHand(modules[0], place, ranks, args.microbatches, loss_fn)
    else:
        stages = [
            PipelineStage(module, index, count, torch.device("cpu"), group=line)
            for module, index in zip(modules, indices, strict=True)
        ]
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[args.schedule]
        schedule = kind(stages if several else stages[0], args.microbatches, loss_fn=loss_fn)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.randn(320, args.width, generator=generator), torch.randint(0, CLASSES, (320,), generator=generator)
    )
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    extras = {} if args.schedule == "hand" else {"schedule": schedule}
    if args.share:
        extras["build_stage"] = lambda index: build(args.share, run.rank, part(index, count, args.width, args.norm))
    run.protect(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        stage=place,
        checkpoint_every=args.every,
        checkpoint_dir=args.checkpoint_dir,
        approximate=args.approximate,
        **extras,
    )
    began = values(model)
    losses: dict[int, float] = {}
    attempts: list[int] = []
    for step in run.steps(args.steps):
        with step:
            linger(step.index, args.steps - 1)
            if args.damage is not None and step.index == 8 and step.attempt == 0 and run.rank == 0:
                damage(args.damage, run)
            if step.index in args.die[:1] and run.rank in args.die[1:]:
                die_together(args.out, run.rank, len(args.die) - 1)
            if args.lose == [step.index, run.rank] and step.attempt == 0 and run.generation == 0:
                shutil.rmtree(run._parts.stages.checkpoints._directory)
                os.kill(os.getpid(), signal.SIGKILL)
            if args.commit_first and step.index % args.every == args.every - 1:
                until_committed(run, step.index + 1 - args.every)
            optimizer.zero_grad()
            found: list[torch.Tensor] = []
            if args.slow_s:
                time.sleep(args.slow_s)
            x, y = step.batch if place in (0, length - 1) else (None, None)
            given = (x,) if place == 0 else ()
            if args.twice:
                schedule.step(*given, **({"target": y} if place == length - 1 else {}))
            if args.autocast:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    schedule.step(*given, **({"target": y, "losses": found} if place == length - 1 else {}))
                losses[step.index] = torch.stack(found).mean().item() if found else 0.0
            elif place == length - 1:
                schedule.step(*given, target=y, losses=found)
                losses[step.index] = torch.stack(found).mean().item()
            else:
                schedule.step(*given)
            if args.mean:
                mean = torch.tensor([losses.get(step.index, 0.0)])
                dist.all_reduce(mean, group=line)
                losses[step.index] = mean.item()
            optimizer.step()
            scheduler.step()
        attempts.append(step.index)
    report = {
        "rank": run.rank,
        "digest": regrow.state_digest(model, optimizer, scheduler.state_dict(), {"rng": torch.get_rng_state()}),
        "losses": losses,
        "values": values(model),
        "began": began,
        "attempts": attempts,
        "pid": os.getpid(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rank{run.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
