"""Whatever torch.distributed offers must do on ``regrow`` what it does on gloo, bit by bit, also where it refuses."""

from __future__ import annotations

import io
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from regrow.group import Mode
from test_group_world import WAIT_S, world  # noqa: F401 (a fixture)

RANKS = 3


def _seeded(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(*shape, generator=generator) * 50).to(dtype)


def _done(work, async_op):
    if async_op:
        assert work is not None
        work.wait()
    else:
        assert work is None


def _all_reduce(rank, async_op):
    found = []
    operators = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG)
    for operator in operators:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            if operator == dist.ReduceOp.AVG and dtype != torch.float32:
                continue
            tensor = _seeded(rank, 1001, dtype=dtype)
            found.append(
                _try(lambda t=tensor, o=operator: (_done(dist.all_reduce(t, o, async_op=async_op), async_op), t)[1])
            )
    return found


def _broadcast(rank, async_op):
    tensor = _seeded(rank, 7, 3)
    _done(dist.broadcast(tensor, 1, async_op=async_op), async_op)
    return tensor


def _reduce(rank, async_op):
    tensor = _seeded(rank, 70)
    _done(dist.reduce(tensor, 2, async_op=async_op), async_op)
    return tensor if rank == 2 else None


def _all_gather(rank, async_op):
    outputs = [torch.empty(11) for _ in range(RANKS)]
    _done(dist.all_gather(outputs, _seeded(rank, 11), async_op=async_op), async_op)
    return outputs


def _all_gather_into_tensor(rank, async_op):
    output = torch.empty(RANKS * 11)
    _done(dist.all_gather_into_tensor(output, _seeded(rank, 11), async_op=async_op), async_op)
    return output


def _gather(rank, async_op):
    outputs = [torch.empty(4) for _ in range(RANKS)] if rank == 0 else None
    _done(dist.gather(_seeded(rank, 4), outputs, 0, async_op=async_op), async_op)
    return outputs


def _scatter(rank, async_op):
    output = torch.empty(4)
    inputs = [_seeded(peer, 4) for peer in range(RANKS)] if rank == 1 else None
    _done(dist.scatter(output, inputs, 1, async_op=async_op), async_op)
    return output


def _reduce_scatter(rank, async_op):
    output = torch.empty(9)
    _done(dist.reduce_scatter(output, list(_seeded(rank, RANKS, 9)), async_op=async_op), async_op)
    return output


def _reduce_scatter_tensor(rank, async_op):
    output = torch.empty(9)
    _done(dist.reduce_scatter_tensor(output, _seeded(rank, RANKS * 9), async_op=async_op), async_op)
    return output


def _all_to_all(rank, async_op):
    outputs = [torch.empty(5) for _ in range(RANKS)]
    _done(dist.all_to_all(outputs, list(_seeded(rank, RANKS, 5)), async_op=async_op), async_op)
    return outputs


def _all_to_all_single(rank, async_op):
    output = torch.empty(sum(sender + 1 for sender in range(RANKS)))
    inputs = _seeded(rank, RANKS * (rank + 1))
    splits = [sender + 1 for sender in range(RANKS)]
    _done(dist.all_to_all_single(output, inputs, splits, [rank + 1] * RANKS, async_op=async_op), async_op)
    return output


def _coalesced(rank, async_op):
    tensors = [_seeded(rank, 3), _seeded(rank, 8)]
    _done(dist.all_reduce_coalesced(tensors, async_op=async_op), async_op)
    outputs = [[torch.empty(3), torch.empty(8)] for _ in range(RANKS)]
    _done(dist.all_gather_coalesced(outputs, [_seeded(rank, 3), _seeded(rank, 8)], async_op=async_op), async_op)
    return [tensors, outputs]


def _barriers(rank, async_op):
    _done(dist.barrier(async_op=async_op), async_op)
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=WAIT_S), wait_all_ranks=True)


def _point_to_point(rank, async_op):
    into, after, before = torch.empty(6), (rank + 1) % RANKS, (rank - 1) % RANKS
    if async_op:
        works = [dist.irecv(into, before, tag=5), dist.isend(_seeded(rank, 6), after, tag=5)]
        for work in works:
            work.wait()
    elif rank % 2:
        dist.recv(into, before)
        dist.send(_seeded(rank, 6), after)
    else:
        dist.send(_seeded(rank, 6), after)
        assert dist.recv(into, before) == before
    return into


def _from_anyone(rank, async_op):
    into, sources = torch.empty(4), []
    if rank == 0:
        sources = sorted(dist.recv(into) for _ in range(RANKS - 1))
    else:
        dist.send(_seeded(rank, 4), 0)
    dist.barrier()  # or a later message would be received from anyone
    return sources


def _batched(rank, async_op):
    into, outgoing = torch.empty(6), _seeded(rank, 6)
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, into, (rank - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return into


def _objects(rank, async_op):
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, {"rank": rank})
    listed = [rank, "x" * rank]
    dist.broadcast_object_list(listed, 2)
    gathered = [None] * RANKS if rank == 1 else None
    dist.gather_object((rank,), gathered, 1)
    got = [None]
    dist.scatter_object_list(got, [{"to": peer} for peer in range(RANKS)] if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list(["hello"], 1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, 0)
        got += received
    return [everyone, listed, gathered, got]


def _functional(rank, async_op):
    group = dist.group.WORLD
    return [
        functional.all_reduce(_seeded(rank, 13), "sum", group) + 0,
        functional.all_gather_single(_seeded(rank, 4), 0, group) + 0,
        functional.reduce_scatter_single(_seeded(rank, RANKS * 4), "sum", 0, group) + 0,
        functional.all_to_all_single(_seeded(rank, RANKS * 2), None, None, group) + 0,
        functional.broadcast(_seeded(rank, 3), 1, group) + 0,
        [tensor + 0 for tensor in functional.all_reduce_coalesced([_seeded(rank, 3), _seeded(rank, 2)], "sum", group)],
        [
            tensor + 0
            for tensor in functional.all_gather_into_tensor_coalesced([_seeded(rank, 3), _seeded(rank, 2)], group)
        ],
        [
            tensor + 0
            for tensor in functional.reduce_scatter_tensor_coalesced(
                [_seeded(rank, 6), _seeded(rank, 3)], "sum", [0, 0], group
            )
        ],
    ]


def _distributed_tensor(rank, async_op):
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = _seeded(0, 12, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    moved = sharded.redistribute(mesh, [Shard(1)])
    return [
        moved.to_local(),
        sharded.redistribute(mesh, [Replicate()]).to_local(),
        (sharded @ sharded.t()).full_tensor(),
    ]


def _groups(rank, async_op):
    pair = dist.new_group([0, 2])
    other = dist.new_group([2, 1, 0])
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    tensor, more = _seeded(rank, 5), _seeded(rank, 5)
    if rank in (0, 2):
        dist.all_reduce(tensor, group=pair)
        assert dist.get_rank(pair) == rank // 2 and dist.get_world_size(pair) == 2
    dist.all_reduce(tensor, group=other)
    dist.all_reduce(more, group=mine)
    facts = [dist.get_process_group_ranks(mine), mine.group_name, mine.group_desc, dist.group.WORLD.size()]
    dist.destroy_process_group(mine)
    return [tensor, more, facts]


def _futures(rank, async_op):
    work = dist.all_reduce(_seeded(rank, 5), async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    return future.wait()


def _autograd(rank, async_op):
    import torch.distributed.nn.functional as differentiable

    tensor = _seeded(rank, 6).requires_grad_()
    differentiable.all_reduce(tensor * 2).sum().backward()
    gathered = _seeded(rank, 2).requires_grad_()
    torch.stack(differentiable.all_gather(gathered)).pow(2).sum().backward()
    outputs = differentiable.all_to_all([torch.empty(2) for _ in range(RANKS)], list(_seeded(rank, RANKS, 2)))
    return [tensor.grad, gathered.grad, list(outputs)]


def _timeouts(rank, async_op):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_S / 2), dist.group.WORLD)
    return dist.distributed_c10d._get_object_coll_device()


def _refusals(rank, async_op):
    return [
        _try(lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX)),
        _try(lambda: dist.all_gather([torch.empty(2)], torch.ones(3))),
        _try(lambda: dist.split_group(split_ranks=[[0, 1], [2]])),
        _try(lambda: dist.send(torch.ones(2), dst=rank)),
    ]


CASES = (
    _all_reduce, _broadcast, _reduce, _all_gather, _all_gather_into_tensor, _gather, _scatter, _reduce_scatter,
    _reduce_scatter_tensor, _all_to_all, _all_to_all_single, _coalesced, _barriers, _point_to_point, _from_anyone,
    _batched, _objects, _functional, _distributed_tensor, _groups, _futures, _autograd, _timeouts, _refusals,
)  # fmt: skip


def _try(call):
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (whatever gloo refuses with, regrow must refuse with)
        return f"{type(error).__name__}: {str(error)[:60]}"


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and _bits(one) == _bits(other)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _bits(tensor):
    with io.BytesIO() as stream:
        stream.write(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return tuple(tensor.shape), stream.getvalue()


def _run_all(member):
    return {
        (case.__name__, flag): _try(lambda c=case, f=flag: c(member.rank, f))
        for case in CASES
        for flag in (False, True)
    }


def _run_contract(member):
    results, base = {}, member.store
    for backend in ("gloo", "regrow"):
        member.store = dist.PrefixStore(backend, base)
        fabric = member.weave() if backend == "regrow" else None
        member.init(backend)
        results[backend] = _run_all(member)
        if fabric is not None:
            record = fabric.seal()
            results["live"] = _run_all(member)
            assert fabric.intact()
            dist.barrier()
            fabric.close()
        dist.destroy_process_group()
    # and now each rank for itself: the record stands in for the others
    fabric = member.weave(Mode.REPLAYING, record=record)
    member.init()
    results["replayed"] = _run_all(member)
    fabric.go_live()
    dist.destroy_process_group()
    wanted = results.pop("gloo")
    differing = [
        (kind, key, found[key], value) for kind, found in results.items() for key, value in wanted.items()
        if not _same(found[key], value) and not (kind == "live" and key[0] == "_groups")  # names count up
    ]  # fmt: skip
    failed = [(key, value) for key, value in wanted.items() if isinstance(value, str) and "Error" in value]
    member.say("differing", (str(differing)[:3000], failed))


def test_every_operation_gives_what_gloo_gives(world):  # noqa: F811
    workers = world.start_all(_run_contract, RANKS)
    for worker in workers:
        differing, failed = worker.hear("differing")
        assert differing == "[]"
        assert failed == []
    for worker in workers:
        worker.finish()
