"""Records of a set-up: kept whole, refused when damaged, limited in size; and what a fabric does with them."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.group import Mode, sockets
from regrow.group.record import Recorder, Replayer, decode, encode
from test_group_world import world  # noqa: F401 (a fixture)


class _Finished(dist.Work):
    def wait(self, timeout=None):
        return True


def _recorded(tensors, name="allreduce", limit=1 << 20):
    recorder = Recorder(limit)
    recorder.take("0", name, tensors, _Finished()).wait()
    return recorder


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_outputs_come_back_bit_by_bit(dtype, shape):
    tensor = (torch.randn(shape) * 9).to(dtype)
    again = torch.zeros(shape).to(dtype)
    Replayer(_recorded([tensor]).bytes()).answer("0", "allreduce", [again]).wait()
    assert again.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_strided_output_is_filled_in_place():
    wanted, target = torch.arange(6.0).reshape(2, 3).t(), torch.zeros(2, 3).t()
    Replayer(_recorded([wanted]).bytes()).answer("0", "allreduce", [target])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("at", [0, 5, 12, 30, -1])
def test_a_damaged_record_is_refused(at):
    record = bytearray(_recorded([torch.ones(9)]).bytes())
    record[at] ^= 0x40
    with pytest.raises(ValueError, match="record"):
        Replayer(bytes(record))


def test_a_short_record_is_refused():
    with pytest.raises(ValueError, match="cut short"):
        decode(encode({}, b"")[:-3])


def test_too_large_a_set_up_says_what_to_do():
    recorder = _recorded([torch.ones(1 << 19)])
    with pytest.raises(ValueError, match=r"over the limit of 1 MB.*behind the first step"):
        recorder.bytes()


def test_module_state_is_not_in_the_record(world):  # noqa: F811
    for worker in world.start_all(_wraps_a_large_model, 2):
        assert worker.hear("size") < 100_000
        worker.finish()


def _wraps_a_large_model(member):
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # torch then meets in the store after each new group
    fabric = member.weave()
    member.init()
    DistributedDataParallel(nn.Linear(1000, 1000))
    dist.new_group([0])
    record = fabric.seal()
    with fabric.recording() as taken:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.full((3,), member.rank), 1)
    dist.barrier()
    dist.destroy_process_group()
    fabric.close()
    fabric = member.weave(Mode.REPLAYING, record=record)
    member.init()
    mine = nn.Linear(1000, 1000)
    before = mine.weight.detach().clone()
    wrapped = DistributedDataParallel(mine)
    assert torch.equal(wrapped.module.weight, before)
    dist.new_group([0])
    total, sent = torch.ones(2), torch.zeros(3, dtype=torch.int64)
    with fabric.replaying(taken.bytes()):
        dist.all_reduce(total)
        dist.broadcast(sent, 1)
    assert total.tolist() == [2.0, 2.0] and sent.tolist() == [1, 1, 1]
    fabric.go_live()
    member.reconnect(1)
    dist.all_reduce(total)
    assert total.tolist() == [4.0, 4.0]
    member.say("size", len(record))
    dist.destroy_process_group()


def test_only_the_named_sockets_are_severed():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        ours, theirs = (socket.create_connection(each.getsockname()) for each in (listener, other))
        accepted, spared = listener.accept()[0], other.accept()[0]
        names = sockets.Names(own=frozenset({listener.getsockname()}))
        found = {connection.fd for connection in sockets.find(names)}
        assert found == {listener.fileno(), accepted.fileno()}
        watched = [connection for connection in sockets.find(names) if not connection.listening]
        assert sockets.is_up(watched[0])
        assert sockets.sever(names) == 1
        assert not sockets.is_up(watched[0])
        assert ours.recv(1) == b""
        theirs.sendall(b"x")
        assert spared.recv(1) == b"x"
        for each in (ours, theirs, accepted, spared):
            each.close()


@pytest.mark.parametrize("blob", [b"", b"short", bytes(200), b"\xff" * 200])
def test_what_is_not_an_address_is_refused(blob):
    with pytest.raises(ValueError, match="not the address of a gloo rank"):
        sockets.parse_listener(blob)
