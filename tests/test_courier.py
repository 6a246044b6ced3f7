"""Messages between ranks: in order, whole, woken when a generation ends, and never of an older one."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from regrow import wire
from regrow.courier import Courier, memory_of
from regrow.errors import PeerLost

LONG = timedelta(seconds=60)


@pytest.fixture
def pair():
    couriers = [Courier(rank, "127.0.0.1", "secret", print) for rank in range(2)]
    resume(couriers, 1)
    yield couriers
    for courier in couriers:
        courier.close()


def resume(couriers, generation):
    for courier in couriers:
        courier.resume(generation, [each.address for each in couriers])


def send(courier, peer, name, tensor, stays=False):
    courier.send(peer, name, memory_of(tensor), stays=stays)


def receive(courier, peer, name, like):
    tensor = torch.zeros_like(like)
    courier.receive(peer, name, tensor, LONG).wait()
    return tensor


def test_messages_of_one_name_come_in_order_and_names_in_any(pair):
    a, b = pair
    for number in range(3):
        send(a, 1, "x", torch.tensor([number]))
        send(a, 1, "y", torch.tensor([10.0 * number, 1.0]))
    assert [receive(b, 0, "y", torch.zeros(2)).tolist() for _ in range(3)] == [[0.0, 1.0], [10.0, 1.0], [20.0, 1.0]]
    assert [int(receive(b, 0, "x", torch.zeros(1, dtype=torch.int64))) for _ in range(3)] == [0, 1, 2]


def test_receipts_posted_first_are_served_first_whoever_is_waited_for(pair):
    a, b = pair
    tensors = [torch.zeros(1) for _ in range(3)]
    receipts = [b.receive(0, "x", tensor, LONG) for tensor in tensors]
    for number in range(3):
        send(a, 1, "x", torch.tensor([float(number)]))
    for receipt in reversed(receipts):
        receipt.wait()
    assert [tensor.item() for tensor in tensors] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.tensor(3.5), torch.ones(3, 2, dtype=torch.bfloat16)], ids=str)
def test_any_shape_and_type(pair, tensor):
    send(pair[0], 1, "x", tensor)
    assert torch.equal(receive(pair[1], 0, "x", tensor), tensor)


def test_a_tensor_that_is_not_contiguous_can_receive(pair):
    sent = torch.arange(6.0).reshape(2, 3)
    send(pair[0], 1, "x", sent)
    place = torch.zeros(3, 2).t()
    pair[1].receive(0, "x", place, LONG).wait()
    assert torch.equal(place, sent)


@pytest.mark.parametrize("stays", [True, False])
def test_both_send_far_more_than_the_kernel_takes_before_either_receives(pair, stays):
    """With messages that must be received before sending goes on, both would wait for ever."""
    sent = [torch.randn(8 << 20) for _ in pair]
    for courier, tensor in zip(pair, sent, strict=True):
        given = tensor if stays else tensor.clone()
        send(courier, 1 - pair.index(courier), "x", given, stays)
        if not stays:
            given.zero_()  # as a script may do as soon as sending has returned
    with ThreadPoolExecutor(2) as pool:
        got = [pool.submit(receive, courier, 1 - rank, "x", sent[0]) for rank, courier in enumerate(pair)]
        found = [each.result(60) for each in got]
    assert torch.equal(found[0], sent[1]) and torch.equal(found[1], sent[0])
    for courier in pair:
        courier.flush()


def waiting(call):
    """Run a call in a thread that is expected to fail; return a function that gives its error."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return lambda: future.exception(30)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("connected", [True, False])
def test_the_end_of_a_generation_wakes_who_waits(pair, connected):
    a, b = pair
    if connected:
        send(a, 1, "x", torch.ones(1))
        receive(b, 0, "x", torch.ones(1))
    error = waiting(lambda: receive(b, 0, "x", torch.ones(1)))
    until(lambda: b.waiting)
    b.sever(below=2)
    assert isinstance(error(), PeerLost) and "generation 1 ended" in str(error())
    assert not b.waiting


def test_a_half_read_message_of_a_rank_that_dies_is_an_error(pair):
    _, b = pair
    sender = socket.create_connection(b.address, 10)
    sender.sendall(wire.encode({"type": "hello", "token": "secret", "generation": 1, "rank": 0}))
    error = waiting(lambda: receive(b, 0, "x", torch.ones(100)))
    sender.sendall(b"\0\x01" + (400).to_bytes(8, "big") + b"x" + b"\0" * 100)
    sender.close()
    assert isinstance(error(), PeerLost) and "rank 0 cannot be reached" in str(error())


def half_a_message(courier):
    """Connect as rank 0 would, and begin a message."""
    sender = socket.create_connection(courier.address, 10)
    sender.sendall(wire.encode({"type": "hello", "token": "secret", "generation": 1, "rank": 0}))
    until(lambda: courier._incoming.get((1, 0)) is not None and courier._incoming[1, 0].connection is not None)
    sender.sendall(b"\0\x01" + (8).to_bytes(8, "big") + b"x" + b"\0" * 4)
    return sender


def test_what_follows_a_half_read_message_is_not_taken_for_another(pair):
    b = pair[1]
    with half_a_message(b) as sender:
        receipt = b.receive(0, "x", torch.ones(2), timedelta(milliseconds=1))
        with pytest.raises(RuntimeError, match="timed out"):
            receipt.wait()
        again = b.receive(0, "", torch.ones(0), LONG)
        sender.sendall(b"\0" * 14)  # the rest of it, and more: which reads as the head of an empty message
        with pytest.raises(PeerLost, match="rank 0 cannot be reached: a message was left half read"):
            again.wait()
        assert not again.is_completed()


def test_a_wait_that_ended_before_the_message_began_can_be_made_again(pair):
    a, b = pair
    send(a, 1, "y", torch.ones(1))
    receive(b, 0, "y", torch.ones(1))  # both are connected
    place = torch.zeros(1)
    receipt = b.receive(0, "x", place, LONG)
    with pytest.raises(RuntimeError, match="timed out"):
        receipt.wait(timedelta(milliseconds=1))
    send(a, 1, "x", torch.ones(1))
    receipt.wait()
    assert place.item() == 1.0


def test_the_end_of_a_generation_wakes_who_connects_to_a_host_that_is_gone(pair, unanswered):
    a = pair[0]
    a.resume(2, [a.address, unanswered])
    error = waiting(lambda: send(a, 1, "x", torch.ones(1)))
    until(a._connecting.locked)
    a.sever(below=3)
    assert isinstance(error(), PeerLost) and "generation 2 ended" in str(error())
    assert a.sockets() == [a._door.listener]


def test_the_end_of_a_generation_is_not_blamed_on_the_rank_that_was_sent_to(pair):
    a = pair[0]
    send(a, 1, "x", torch.ones(8 << 20))  # more than the kernel takes
    outgoing = a._outgoing[1]
    a.sever(below=2)
    until(lambda: outgoing._error is not None)
    with pytest.raises(PeerLost, match="generation 1 ended"):
        a.flush()


def test_a_message_is_noticed_whatever_the_number_of_its_descriptor(pair):
    a, b = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("no descriptor above 1023 may be had here")
    send(a, 1, "x", torch.ones(1))
    receive(b, 0, "x", torch.ones(1))
    incoming = b._incoming[1, 0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    try:
        incoming.connection = socket.socket(fileno=fcntl.fcntl(incoming.connection, fcntl.F_DUPFD_CLOEXEC, 1500))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not b.has(0, "y")
    send(a, 1, "y", torch.ones(1))
    assert b.has(0, "y")


def test_an_end_that_came_before_the_generation_began_is_not_forgotten(pair):
    b = pair[1]
    b.sever(below=3)
    b.resume(2, [each.address for each in pair])
    with pytest.raises(PeerLost, match="generation 2 ended"):
        receive(b, 0, "x", torch.ones(1))
    with pytest.raises(PeerLost):
        send(b, 0, "x", torch.ones(1))


def test_nothing_of_an_older_generation_is_received(pair):
    a, b = pair
    send(a, 1, "x", torch.tensor([1.0]))
    until(lambda: b._incoming.get((1, 0)) is not None and b._incoming[1, 0].connection is not None)
    resume(pair, 2)
    send(a, 1, "x", torch.tensor([2.0]))
    assert receive(b, 0, "x", torch.ones(1)).item() == 2.0


def test_a_thread_of_an_older_generation_neither_sends_nor_takes(pair):
    """It may have been held up elsewhere, by storage for instance, while all others went on."""
    a, b = pair
    resume(pair, 2)
    for late in (
        lambda: b.take(0, "x", LONG, generation=1),
        lambda: b.send(0, "x", memory_of(torch.zeros(1)), stays=True, generation=1),
    ):
        with pytest.raises(PeerLost, match="generation 1 is over"):
            late()
    send(a, 1, "x", torch.tensor([1.0]))
    assert len(b.take(0, "x", LONG, generation=2)) == 4


def test_a_wait_ends_though_the_next_generation_has_begun_before_it_looked(pair):
    """Nobody is connected, so there is no connection whose end would tell."""
    _, b = pair
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(b.take, 0, "x", LONG)
        while not b.waiting:
            time.sleep(0.001)
        resume(pair, 2)
        with pytest.raises(PeerLost, match="generation 1 is over"):
            waiting.result(timeout=10)


def test_a_message_of_the_next_generation_may_come_early(pair):
    a, b = pair
    a.resume(2, [each.address for each in pair])
    send(a, 1, "x", torch.tensor([2.0]))
    until(lambda: (2, 0) in b._incoming)
    b.resume(2, [each.address for each in pair])
    assert receive(b, 0, "x", torch.ones(1)).item() == 2.0


def test_a_stranger_is_not_heard(pair):
    stranger = socket.create_connection(pair[1].address, 10)
    stranger.sendall(wire.encode({"type": "hello", "token": "guess", "generation": 1, "rank": 0}))
    assert stranger.recv(1) == b""  # hung up
    assert (1, 0) not in pair[1]._incoming
    stranger.close()


def test_sizes_that_differ_are_refused_with_both(pair):
    send(pair[0], 1, "x", torch.ones(3))
    with pytest.raises(ValueError, match=r"rank 0 sent 12 bytes, but a tensor of \(2,\) and torch.float32 \(8 bytes\)"):
        receive(pair[1], 0, "x", torch.ones(2))


def test_a_limit_of_time_is_kept(pair):
    with pytest.raises(RuntimeError, match="timed out waiting for a message from rank 0"):
        pair[1].receive(0, "x", torch.ones(1), timedelta(milliseconds=1)).wait()


def test_a_rank_that_is_gone_cannot_be_sent_to(pair):
    pair[1].close()
    with pytest.raises(PeerLost, match="rank 1 cannot be reached"):
        for _ in range(1000):
            send(pair[0], 1, "x", torch.ones(1 << 16))


def test_a_forked_child_keeps_no_connection_open(pair):
    a, b = pair
    send(a, 1, "x", torch.ones(1))
    receive(b, 0, "x", torch.ones(1))
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        for each in a.sockets()[1:]:
            os.close(each.detach())  # as when the process is killed: closed, and not shut down
        with pytest.raises(PeerLost, match="rank 0 cannot be reached"):
            b.receive(0, "x", torch.ones(1), timedelta(seconds=20)).wait()
    finally:
        os.write(go[1], b"1")
        os.waitpid(child, 0)


def test_closing_ends_all_threads():
    before = set(threading.enumerate())
    pair = [Courier(rank, "127.0.0.1", "secret", print) for rank in range(2)]
    resume(pair, 1)
    send(pair[0], 1, "x", torch.ones(8 << 20))  # more than the kernel takes: a thread writes the rest
    for courier in pair:
        courier.close()
    until(lambda: set(threading.enumerate()) <= before)
