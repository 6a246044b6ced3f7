"""Wrappers built on torch.distributed compute on ``regrow`` what they compute on gloo: the same weights, bit by bit."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from test_group_world import world  # noqa: F401 (a fixture)


def _seeded(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + rank))


def _digest(tensors):
    return [hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest() for tensor in tensors]


def _train(model, rank, parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for step in range(4):
        model(_seeded(10 * step + rank, 6, 40)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40))


def _ddp(rank):
    model = nn.parallel.DistributedDataParallel(_network(), bucket_cap_mb=0.01)
    _train(model, rank, model.parameters())
    return _digest(model.parameters())


def _fsdp(rank, mesh):
    model = _network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, rank, model.parameters())
    return _digest(parameter.to_local() for parameter in model.parameters())


def _pipeline(rank):
    torch.manual_seed(3)
    pair = dist.new_group([0, 1])
    if rank > 1:
        return []
    part = nn.Linear(40, 40)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=pair)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(_seeded(0, 4, 40))
    else:
        schedule.step(target=_seeded(1, 4, 40))
    return _digest(parameter.grad for parameter in part.parameters())


def _run_wrappers(member):
    results, base = {}, member.store
    for backend in ("gloo", "regrow"):
        member.store = dist.PrefixStore(backend, base)
        fabric = member.weave() if backend == "regrow" else None
        member.init(backend)
        flat = init_device_mesh("cpu", (member.size,))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if fabric is not None:
            fabric.seal()
        rank = member.rank
        results[backend] = [_ddp(rank), _fsdp(rank, flat), _fsdp(rank, grid), _pipeline(rank)]
        dist.destroy_process_group()
    member.say("results", results)


def test_ddp_fsdp_hsdp_and_pipelines_compute_what_they_compute_on_gloo(world):  # noqa: F811
    workers = world.start_all(_run_wrappers, 4)
    for worker in workers:
        results = worker.hear("results")
        assert results["regrow"] == results["gloo"]
        assert results["gloo"][0]
    for worker in workers:
        worker.finish()
