"""A small job whose state is sharded: fully_shard on one or two dimensions, or an optimizer that is."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow
from host import linger, lose_host
from regrow import state_digest
from regrow.iterative import record, storage
from regrow.peer.room import Room


def net(width: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 5))


def sharded(how: str, world: int, mixed: bool, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = net(width)
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


def sums(params: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of whole parameters, wherever their parts are."""
    whole = {name: param.full_tensor() if isinstance(param, DTensor) else param for name, param in params.items()}
    return {name.removeprefix("module."): float(param.double().sum()) for name, param in whole.items()}


def damage(run: regrow.Run, which: str) -> None:
    run._parts.snapshots.settle()
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


def spoil(path: Path) -> None:
    """Damage the arrays of one block, in both of its records, whose heads say as before that they are there."""
    raw = bytearray(path.read_bytes())
    place = next(iter(storage._read_index(memoryview(raw)).values()))
    for start in (place.offset, place.offset + place.size):
        if not record.is_empty(memoryview(raw)[start:]):
            raw[start + record._HEAD.size + record._HEAD.unpack_from(raw, start)[3]] ^= 1
    path.write_bytes(raw)


class Strikes:
    """What is to happen at a rank's step, each once in all processes that hold it one after another."""

    def __init__(self, run: regrow.Run, out: Path, planned: list[list[str]]) -> None:
        self._run = run
        self._out = out
        self._planned = {(int(rank), int(step)): what for what, rank, step in planned}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"pid{run.rank}").write_text(str(os.getpid()))

    def at(self, step: int) -> None:
        """Pass a step's beginning; -1 is the set-up's end."""
        what = self._planned.get((self._run.rank, step))
        if what is None:
            return
        try:
            (self._out / f"{what}-{self._run.rank}-{step}").touch(exist_ok=False)
        except FileExistsError:
            return
        if what == "host":
            if self._run.generation == 0:  # whoever takes its place on another host does not find that mark
                lose_host()
            return
        if what in ("lose", "spoil"):
            self._run._parts.snapshots._task.over.wait(10)  # everyone has come to this step, too
        if what in ("forget", "unlearn", "drop", "lose", "spoil"):
            self._run._parts.snapshots.abandon()
        if what in ("forget", "drop", "lose", "spoil"):
            self._run._shelf.remove()
        if what == "spoil":
            self._run._parts.rounds._wait_for_storage()
            spoil(self._run._parts.rounds._directory / storage._FILE)
        if what == "unlearn":
            self._run._shelf.drop_unless(lambda head: head.step < step)
            for keeper in self._run._parts.snapshots._copies._clients.values():
                keeper.drop_after(self._run.rank, self._run.generation + 1, step - 1)  # as the next one would
        ranks = [self._run.rank]
        if what in ("all", "forget"):
            ranks = sorted(range(self._run.world_size), key=self._run.rank.__eq__)
        for rank in ranks:  # the own one last
            os.kill(int((self._out / f"pid{rank}").read_text()), signal.SIGKILL)


def values(model: nn.Module) -> list[float]:
    """Return this rank's part of the parameters."""
    parts = [getattr(param, "_local_tensor", param).detach().flatten() for param in model.parameters()]
    return torch.cat(parts).tolist()


def wait(out: Path, run: regrow.Run, step: int) -> None:
    """Let whoever watches do something now. One who was ahead of a rank that died goes back first, and waits then."""
    arrived = out / f"at-{step}-{run.rank}"
    arrived.touch()
    deadline = time.monotonic() + 60
    while not (out / f"go-{step}").exists():
        if run._link.generation != run.generation:
            arrived.unlink()
            return
        assert time.monotonic() < deadline, f"nobody lets step {step} go on"
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="fsdp", choices=("fsdp", "hsdp", "zero"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--idle-s", type=float, default=0.0, help="the network has so long nothing to do in a step")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--tail", action="store_true", help="a collective after the update")
    parser.add_argument(
        "--damage", choices=("newest", "all", "gone"), help="rank 1 damages its snapshots in step 4, and dies"
    )
    parser.add_argument(
        "--strike",
        nargs=3,
        action="append",
        default=[],
        metavar=("WHAT", "RANK", "STEP"),
        help="there, once: kill this rank, or all ranks, or its host; or unlearn its newest snapshot, wherever it is, "
        "and kill it; or drop (or lose: when all have come there) its snapshots and kill it, or "
        "forget them and kill all",
    )
    parser.add_argument("--wait", type=int, action="append", default=[], help="wait in this step until it may go on")
    parser.add_argument("--ahead", action="store_true", help="rank 1 begins to update before others may compute")
    parser.add_argument("--pretend-room", type=int, help="so many bytes of memory are left")
    parser.add_argument("--approximate", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGWINCH)
    torch.set_num_threads(1)

    run = regrow.init()
    model = sharded(args.how, run.world_size, args.mixed, args.width)
    torch.manual_seed(100 + run.rank)
    if args.how == "zero":
        opt: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(101, 16, generator=generator), torch.randint(0, 5, (101,), generator=generator))
    began = values(model)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    run.protect(model=model, optimizer=opt, scheduler=scheduler, loader=loader, approximate=args.approximate)

    strikes = Strikes(run, args.out, args.strike)
    strikes.at(-1)
    if args.pretend_room is not None:
        run._shelf.room = lambda: Room(args.pretend_room, "a limit that is pretended")
    losses = {}
    for step in run.steps(args.steps):
        with step:
            linger(step.index, args.steps - 1)
            if step.index == 4 and args.damage and run.generation == 0:
                dist.barrier()  # nobody stands in the step before: the snapshot of this one is what is wanted
                if run.rank == 1:
                    damage(run, args.damage)
            if step.index in args.wait:
                wait(args.out, run, step.index)
            strikes.at(step.index)
            x, y = step.batch
            if args.ahead and run.rank == 1:
                run._before_update()  # as for parameters that no other rank has
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), y)
            time.sleep(args.idle_s)
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
        "sums": sums(dict(model.named_parameters())),
        "values": values(model),
        "began": began,
        "pid": os.getpid(),
    }
    (args.out / f"rank{run.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
