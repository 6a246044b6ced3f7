"""The journal: what goes in comes out, whatever is spilled, dropped, cut short or flipped."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from regrow import dial, wire
from regrow.errors import PeerLost
from regrow.journal import Channel, Damaged, Fetcher, Journal, Server, record
from regrow.journal.segments import leave_room

TO_1 = Channel("world", "send", 1, 0)
TO_2 = Channel("world", "send", 2, 0)


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "spill", memory_bytes=1 << 20, segment_bytes=64 << 10)
    yield made
    made.close()


def write(journal, step, *tensors, channel=TO_1):
    journal.begin(step)
    for tensor in tensors:
        journal.append(1, step, channel, tensor)
    journal.complete(step)


def read(journal, step, peer=1):
    return [record.read(memoryview(bytearray(part)), "a record") for part in journal.read(step, peer)]


def values(item):
    tensor = torch.empty(item.shape, dtype=item.dtype)
    item.copy_to(tensor)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(4, 6).t(),
        torch.randn(7, 3).bfloat16(),
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 4),
        torch.tensor([True, False, True]),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.randint(0, 255, (13,), dtype=torch.uint8),
        torch.randn(300_000),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_any_tensor(journal, tensor):
    write(journal, 0, tensor)
    (item,) = read(journal, 0)
    assert (item.step, item.channel, item.sequence, item.generation) == (0, TO_1, 0, 1)
    assert torch.equal(values(item), tensor)


def test_the_sender_may_change_the_tensor_at_once(journal):
    tensor = torch.ones(1000)
    write(journal, 0, tensor)
    tensor.zero_()
    assert torch.equal(values(read(journal, 0)[0]), torch.ones(1000))


def test_messages_keep_their_order_and_their_receiver(journal):
    journal.begin(4)
    for number in range(5):
        journal.append(1, 4, TO_1, torch.tensor([number]))
        journal.append(1, 4, TO_2, torch.tensor([10 * number]))
    assert [int(values(item)) for item in read(journal, 4, 1)] == [0, 1, 2, 3, 4]
    assert [int(values(item)) for item in read(journal, 4, 2)] == [0, 10, 20, 30, 40]
    assert [item.sequence for item in read(journal, 4, 1)] == [0, 1, 2, 3, 4]


def test_a_step_that_is_done_again_replaces_what_it_sent(journal):
    write(journal, 3, torch.zeros(2), torch.zeros(2))
    write(journal, 3, torch.ones(2))
    assert [values(item).tolist() for item in read(journal, 3)] == [[1, 1]]


def test_memory_is_bounded_and_the_rest_is_on_disk(journal, tmp_path):
    sent = {step: torch.randn(10_000) for step in range(100)}  # 4 MB
    for step, tensor in sent.items():
        write(journal, step, tensor)
        assert journal.memory_bytes <= 1 << 20
    assert list((tmp_path / "spill").iterdir())
    for step, tensor in sent.items():
        assert torch.equal(values(read(journal, step)[0]), tensor)
    journal.drop_before(100)
    assert read(journal, 50) == []
    deadline = time.monotonic() + 10
    while list((tmp_path / "spill").iterdir()):  # one may be in the middle of being written
        assert time.monotonic() < deadline
    assert journal.kept_from == 100


def test_messages_larger_than_a_segment_stay_within_the_bound(journal):
    for step in range(30):
        write(journal, step, torch.randn(10_000))
    journal.drop_before(30)  # leaves free segments, each too small for what comes now
    sent = {step: torch.randn(60_000) for step in range(30, 60)}
    for step, tensor in sent.items():
        write(journal, step, tensor)
        assert journal.memory_bytes <= 1 << 20
    for step, tensor in sent.items():
        assert torch.equal(values(read(journal, step)[0]), tensor)


def test_a_spilled_segment_that_is_gone_is_not_asked_for_again(journal, tmp_path):
    for step in range(60):
        write(journal, step, torch.randn(10_000))
    for path in (tmp_path / "spill").iterdir():
        path.unlink()
    server = Server(journal, "127.0.0.1", "secret", print)
    fetcher = Fetcher(0, server.address, "secret", me=1)
    try:
        with pytest.raises(Damaged, match="any more"):
            fetcher.get(0)
        assert len(fetcher.get(59)[TO_1]) == 1
    finally:
        fetcher.close()
        server.close()


@pytest.mark.parametrize(("held", "large"), [(40_000, 200_000), (25_000, 1 << 19)])
def test_a_large_message_makes_room_for_itself(journal, monkeypatch, held, large):
    """At most half of the memory is used, and what is free does not do: nothing is given up for that."""
    monkeypatch.setattr("regrow.journal.log._WAIT_S", 20.0)
    sent = [torch.randn(size) for size in (held, held, held, large, held)]
    began = time.monotonic()
    for step, tensor in enumerate(sent):
        write(journal, step, tensor)
    assert time.monotonic() - began < 15
    assert journal.kept_from == 0
    for step, tensor in enumerate(sent):
        assert torch.equal(values(read(journal, step)[0]), tensor)


def test_a_message_larger_than_all_memory(journal):
    tensor = torch.randn(1 << 20)
    write(journal, 0, tensor)
    write(journal, 1, torch.ones(3))
    assert torch.equal(values(read(journal, 0)[0]), tensor)


def test_a_flipped_bit_and_a_cut_on_disk_are_named(journal, tmp_path):
    for step in range(60):
        write(journal, step, torch.randn(10_000))
    spilled = sorted((tmp_path / "spill").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    raw = bytearray(spilled[0].read_bytes())
    raw[5000] ^= 4
    spilled[0].write_bytes(raw)
    with pytest.raises(Damaged, match="checksum"):
        read(journal, 0)
    spilled[0].write_bytes(raw[:100])
    with pytest.raises(Damaged, match="cut short"):
        read(journal, 0)


def test_a_disk_that_takes_nothing_costs_the_oldest_steps(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    said = []
    journal = Journal(
        tmp_path / "file" / "spill",
        memory_bytes=1 << 20,
        segment_bytes=64 << 10,
        on_event=lambda name, **fields: said.append((name, fields)),
    )
    try:
        for step in range(100):
            write(journal, step, torch.full((10_000,), float(step)))
        assert 0 < journal.kept_from < 99
        for step in range(100):
            found = read(journal, step)
            if step >= journal.kept_from:  # asked after: more may be given up meanwhile
                assert values(found[0])[0] == step
        assert {name for name, _ in said} >= {"journal_given_up"}
        assert max(fields["through_step"] for name, fields in said if name == "journal_given_up") < journal.kept_from
    finally:
        journal.close()


def test_a_disk_that_lets_go_of_nothing_does_not_end_the_training(journal, tmp_path, monkeypatch):
    for step in range(60):
        write(journal, step, torch.randn(10_000))
    assert list((tmp_path / "spill").iterdir())

    def unlink(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        journal.drop_before(60)
    assert read(journal, 0) == []


def test_the_last_of_a_disk_is_left_to_others(tmp_path, monkeypatch):
    """Logs and events are on the same disk; what an administrator keeps for himself does not count as free."""
    free = {"f_frsize": 1 << 10, "f_blocks": 2 << 10, "f_bfree": 2 << 10}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**free, f_bavail=150))
    leave_room(tmp_path, 40 << 10)
    with pytest.raises(OSError, match=r"No space left on device: the last 0\.1 MB are left for logs"):
        leave_room(tmp_path, 60 << 10)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=0, f_bavail=0))
    leave_room(tmp_path, 60 << 10)  # a file system that does not tell


def test_one_step_that_is_larger_than_all_memory_and_no_disk(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    journal = Journal(tmp_path / "file" / "spill", memory_bytes=1 << 20, segment_bytes=64 << 10)
    try:
        sent = [torch.randn(10_000) for _ in range(60)]
        write(journal, 0, torch.ones(10_000))
        write(journal, 1, *sent)
        assert all(torch.equal(values(item), tensor) for item, tensor in zip(read(journal, 1), sent, strict=True))
        write(journal, 2, torch.ones(10_000))
        for step in range(3, 60):
            write(journal, step, torch.ones(10_000))
        assert journal.memory_bytes <= 1 << 20
        assert journal.kept_from > 1
    finally:
        journal.close()


def test_going_back_where_the_disk_takes_nothing(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    journal = Journal(tmp_path / "file" / "spill", memory_bytes=1 << 20, segment_bytes=64 << 10)
    try:
        for _ in range(3):
            for step in range(40):
                write(journal, step, torch.randn(10_000))
            journal.start_at(0)
        assert journal.memory_bytes <= 1 << 20
    finally:
        journal.close()


def test_where_a_rank_goes_on(journal):
    for step in range(5):
        write(journal, step, torch.tensor([step]))
    journal.begin(5)  # interrupted
    journal.start_at(5)
    assert journal.kept_from == 0
    journal.start_at(3)  # back to a checkpoint: what was sent before is there still
    assert journal.kept_from == 0 and read(journal, 3) == [] and len(read(journal, 2)) == 1
    journal.begin(3)
    journal.append(1, 3, TO_1, torch.ones(1))
    journal.start_at(4)  # a replica's state was copied: step 3 was never completed here
    assert journal.kept_from == 0 and len(read(journal, 2)) == len(read(journal, 3)) == 1
    assert journal.partial(3) and not journal.partial(2)
    journal.start_at(7)  # of what lies between nothing is there
    assert journal.kept_from == 7 and read(journal, 2) == []


def test_channels_within_a_domain_are_kept_for_a_moment(journal):
    write(journal, 0, torch.ones(1))
    journal.append(1, 0, TO_2, torch.ones(1))
    journal.drop_channels(0, lambda channel: channel.peer == 2)
    assert len(read(journal, 0, 1)) == 1 and read(journal, 0, 2) == []
    assert journal.kept_from == 0
    server = Server(journal, "127.0.0.1", "secret", print)
    near = Fetcher(0, server.address, "secret", me=2, at_home=True)
    far = Fetcher(0, server.address, "secret", me=1)
    try:
        assert len(far.get(0)[TO_1]) == 1
        with pytest.raises(Damaged, match="any more"):
            near.get(0)
    finally:
        near.close()
        far.close()
        server.close()


def test_another_rank_gets_its_messages(journal):
    server = Server(journal, "127.0.0.1", "secret", print)
    write(journal, 0, torch.arange(5), torch.arange(3))
    write(journal, 1, torch.arange(4))
    fetcher = Fetcher(0, server.address, "secret", me=1)
    try:
        first = fetcher.get(0, then=1)
        assert [values(item).tolist() for item in first[TO_1]] == [[0, 1, 2, 3, 4], [0, 1, 2]]
        assert [values(item).tolist() for item in fetcher.get(1)[TO_1]] == [[0, 1, 2, 3]]
        journal.drop_before(2)
        with pytest.raises(Damaged, match="any more"):
            fetcher.get(1)
    finally:
        fetcher.close()
        server.close()


def test_a_stranger_gets_nothing(journal):
    server = Server(journal, "127.0.0.1", "secret", print)
    write(journal, 0, torch.arange(5))
    fetcher = Fetcher(0, server.address, "wrong", me=1)
    try:
        with pytest.raises(PeerLost):
            fetcher.get(0)
    finally:
        fetcher.close()
        server.close()
    with pytest.raises((PeerLost, OSError)):
        Fetcher(0, server.address, "secret", me=1).get(0)


def test_a_connection_ends_with_the_host_at_its_other_side(journal):
    """Without a word from there: the kernel asks while the connection is idle, and limits what is not taken."""
    server = Server(journal, "127.0.0.1", "secret", print)
    write(journal, 0, torch.arange(5))
    fetcher = Fetcher(0, server.address, "secret", me=1)
    try:
        assert len(fetcher.get(0)[TO_1]) == 1
        (connection,) = server._open
        assert connection.gettimeout() is None  # a fetcher may be idle for as long as it likes
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle_s, every_s, count, unsent_ms = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        assert idle_s + every_s * count <= 60 and unsent_ms <= 60_000
    finally:
        fetcher.close()
        server.close()


def test_closing_meets_a_connection_that_was_just_made(journal, monkeypatch):
    """Between the two, the connection is known to nobody but the thread that makes it."""
    server = Server(journal, "127.0.0.1", "secret", print)
    fetcher = Fetcher(0, server.address, "secret", me=1)
    made = []

    def connect(*args):
        made.append(dial_connect(*args))
        fetcher.close()
        return made[0]

    dial_connect = dial.connect
    monkeypatch.setattr(dial, "connect", connect)
    try:
        with pytest.raises(PeerLost, match="nobody wants it any more"):
            fetcher.get(0)
        assert made[0].fileno() == -1
    finally:
        fetcher.close()
        server.close()


def test_closing_calls_off_a_connection_to_a_host_that_is_gone(monkeypatch, unanswered):
    fetcher = Fetcher(0, unanswered, "secret", me=1)
    looked = threading.Event()
    go_on = fetcher._go_on
    monkeypatch.setattr(fetcher, "_go_on", lambda: (looked.set(), go_on()))
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(fetcher.get, 0)
        assert looked.wait(30)  # it is connecting
        fetcher.close()
        with pytest.raises(PeerLost, match="nobody wants it any more"):
            getting.result(30)


def test_a_closed_server_leaves_no_threads(journal):
    server = Server(journal, "127.0.0.1", "secret", print)
    write(journal, 0, torch.arange(5))
    idle = [Fetcher(0, server.address, "secret", me=1) for _ in range(3)]
    silent = socket.create_connection(server.address, 10.0)  # has not even said hello
    try:
        assert all(len(fetcher.get(0)[TO_1]) == 1 for fetcher in idle)
        deadline = time.monotonic() + 10
        while len(threads := server.threads) < 5:
            assert time.monotonic() < deadline
        server.close()
        assert not any(thread.is_alive() for thread in threads)
        with pytest.raises(PeerLost):
            idle[0].get(0)
    finally:
        silent.close()
        server.close()
        for fetcher in idle:
            fetcher.close()


def test_a_caller_that_hangs_up_does_not_end_the_server(journal, monkeypatch):
    monkeypatch.setattr("regrow.door._TRY_AGAIN_S", 0.001)
    server = Server(journal, "127.0.0.1", "secret", print)
    write(journal, 0, torch.arange(5))
    listening, failures = server._door.listener, [ConnectionAbortedError(), OSError("too many open files")]

    class Failing:
        """Fails twice, and is then the socket itself."""

        def accept(self):
            if failures:
                raise failures.pop()
            return listening.accept()

        def __getattr__(self, name):
            return getattr(listening, name)

    server._door.listener = Failing()
    fetchers = [Fetcher(0, server.address, "secret", me=1) for _ in range(2)]  # the first is taken by the accept before
    try:
        assert all(len(fetcher.get(0)[TO_1]) == 1 for fetcher in fetchers)
        assert not failures
    finally:
        for fetcher in fetchers:
            fetcher.close()
        server.close()


def test_back_pressure_is_reported(tmp_path, monkeypatch):
    """A disk that takes its time: the training thread waits, and memory stays within its bound."""
    said = []
    slow = threading.Event()
    journal = Journal(
        tmp_path, memory_bytes=1 << 20, segment_bytes=64 << 10, on_event=lambda name, **fields: said.append(name)
    )
    spill = journal._spill
    monkeypatch.setattr(journal, "_spill", lambda segment: (slow.wait(0.05), spill(segment)))
    try:
        for step in range(60):
            write(journal, step, torch.randn(10_000))
            assert journal.memory_bytes <= 1 << 20
        assert "journal_waited" in said and "journal_given_up" not in said
        assert journal.waited_s > 0
    finally:
        journal.close()


def test_frames_larger_than_one_read(journal):
    server = Server(journal, "127.0.0.1", "secret", print)
    tensor = torch.randn(3 << 18)
    write(journal, 0, tensor)
    fetcher = Fetcher(0, server.address, "secret", me=1)
    began = time.monotonic()
    try:
        assert torch.equal(values(fetcher.get(0)[TO_1][0]), tensor)
    finally:
        fetcher.close()
        server.close()
    assert time.monotonic() - began < 30
    assert tensor.nbytes < wire.MAX_BLOB_BYTES


def test_what_is_being_sent_stays_where_it_is(tmp_path):
    """A pinned message is neither spilled nor overwritten, also when nobody wants its record any more."""
    journal = Journal(tmp_path, memory_bytes=1 << 20, segment_bytes=64 << 10)
    sent = torch.arange(4096.0)
    pin = journal.append(1, 0, TO_1, sent, pin=True)
    journal.complete(0)
    for step in range(1, 200):
        journal.begin(step)
        journal.append(1, step, TO_1, torch.full((4096,), -1.0))
        journal.complete(step)
        journal.drop_before(step - 3)
    assert torch.equal(pin.tensor, sent)
    journal.unpin([pin])
    assert journal.memory_bytes <= 1 << 20
    journal.close()


def test_one_small_message_that_is_being_sent_holds_its_whole_segment(tmp_path):
    """Between large messages, which have segments of their own, each small one would begin another."""
    journal = Journal(tmp_path, memory_bytes=4 << 20, segment_bytes=1 << 20)
    pins = []
    for _ in range(20):
        pins.append(journal.append(1, 0, TO_1, torch.ones(4), pin=True))
        journal.append(1, 0, TO_2, torch.ones(300_000))
    taken = [pin for pin in pins if pin is not None]
    assert len(taken) == 1
    assert journal.memory_bytes <= 4 << 20
    journal.unpin(taken)
    taken = [journal.append(1, 0, TO_1, torch.ones(4), pin=True) for _ in range(2)]  # both in one segment
    assert None not in taken
    journal.unpin(taken[:1])
    journal.append(1, 0, TO_2, torch.ones(300_000))
    assert journal.append(1, 0, TO_1, torch.ones(4), pin=True) is None
    journal.close()


def test_pins_are_refused_rather_than_let_memory_grow(tmp_path):
    journal = Journal(tmp_path, memory_bytes=1 << 20, segment_bytes=64 << 10)
    pins = [journal.append(1, 0, TO_1, torch.ones(16 << 10), pin=True) for _ in range(64)]
    taken = [pin for pin in pins if pin is not None]
    assert 0 < len(taken) <= 4
    assert journal.memory_bytes <= 1 << 20
    journal.unpin(taken)
    assert journal.append(1, 0, TO_1, torch.ones(16 << 10), pin=True) is not None
    journal.close()
