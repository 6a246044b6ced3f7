"""A small job whose state is sharded: fully_shard on one or two dimensions, or an optimizer that is."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow
from host import linger, lose_host
from regrow import state_digest


def net() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 24), *blocks, nn.Linear(24, 5))


def sharded(how: str, world: int, mixed: bool) -> nn.Module:
    torch.manual_seed(0)
    model = net()
    if how == "zero":
        return DistributedDataParallel(model, bucket_cap_mb=0.005)
    mesh = init_device_mesh("cpu", (world,))
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def damage(run: regrow.Run, which: str) -> None:
    run._snapshots.settle()
    found = run._shelf.whole()
    if which == "gone":
        run._shelf.remove()
        os.kill(os.getpid(), signal.SIGKILL)
    for step in sorted(found)[-1 if which == "newest" else 0 :]:
        path = found[step]._path
        raw = bytearray(path.read_bytes())
        raw[6000] ^= 1
        path.write_bytes(raw)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="fsdp", choices=("fsdp", "hsdp", "zero"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--tail", action="store_true", help="a collective after the update")
    parser.add_argument(
        "--damage", choices=("newest", "all", "gone"), help="rank 1 damages its snapshots in step 4, and dies"
    )
    parser.add_argument(
        "--lose-host",
        type=int,
        nargs=2,
        action="append",
        default=[],
        metavar=("RANK", "STEP"),
        help="kill this rank's agent there",
    )
    parser.add_argument("--pretend-room", type=int, help="so many bytes of memory are left")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGWINCH)
    torch.set_num_threads(1)

    run = regrow.init()
    model = sharded(args.how, run.world_size, args.mixed)
    torch.manual_seed(100 + run.rank)
    if args.how == "zero":
        opt: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(101, 16, generator=generator), torch.randint(0, 5, (101,), generator=generator))
    run.protect(model=model, optimizer=opt, scheduler=scheduler, loader=DataLoader(data, batch_size=4, shuffle=True))

    if args.pretend_room is not None:
        run._shelf.room = lambda: args.pretend_room
    losses = {}
    for step in run.steps(args.steps):
        with step:
            linger(step.index, args.steps - 1)
            if step.index == 4 and args.damage and run.rank == 1 and run.generation == 0:
                damage(run, args.damage)
            if [run.rank, step.index] in args.lose_host and run.generation == 0:
                lose_host()
            x, y = step.batch
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            scheduler.step()
            losses[step.index] = loss.item()
            if args.tail:
                mean = torch.tensor([loss.item()])
                dist.all_reduce(mean)
    inner = opt.optim if isinstance(opt, ZeroRedundancyOptimizer) else opt
    report = {
        "rank": run.rank,
        "digest": state_digest(model, inner, scheduler.state_dict(), {"rng": torch.get_rng_state()}),
        "losses": losses,
        "pid": os.getpid(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rank{run.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
