"""When collectives are under way, and what is sent while none is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from regrow.errors import PeerLost
from regrow.group import Activity
from regrow.group.work import LiveWork
from regrow.run.pacing import Pacer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Collective(dist.Work):
    """An operation that is over when the test says so; with a future, as gloo's all-gather, or without."""

    def __init__(self, has_future: bool = True) -> None:
        super().__init__()
        self.future: torch.futures.Future = torch.futures.Future()
        self._has_future = has_future

    def get_future(self) -> torch.futures.Future:
        if not self._has_future:
            raise RuntimeError("Work::getFuture not implemented.")
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self, *_) -> bool:
        return True


class Network:
    generation = 0

    def given_up(self) -> bool:
        return False


def issue(activity: Activity, has_future: bool = True) -> tuple[Collective, LiveWork]:
    work = Collective(has_future)
    handle = LiveWork(work, Network())
    activity.watch(work, handle)
    return work, handle


def test_spans_are_counted_between_collectives_and_anew_in_each_iteration():
    clock = Clock()
    activity = Activity(clock)
    activity.turn()
    clock.now = 1.0
    first, _ = issue(activity)
    clock.now = 1.5
    second, _ = issue(activity)  # beside the first one: no idle span between them
    assert activity.idle() is None
    first.future.set_result(None)
    assert activity.idle() is None
    clock.now = 2.0
    second.future.set_result(None)
    assert activity.idle() == (1, 0.0)
    clock.now = 5.0
    assert activity.idle() == (1, 3.0)
    assert activity.turn() == [1.0, 3.0]
    assert activity.idle() == (0, 0.0)


def test_a_collective_without_a_future_is_over_when_it_was_waited_for():
    activity = Activity(Clock())
    work, handle = issue(activity, has_future=False)
    work.future.set_result(None)
    assert activity.idle() is None
    handle.wait()
    assert activity.idle() is not None
    handle.wait()  # once more does not count twice
    other, _ = issue(activity)
    assert activity.idle() is None
    other.future.set_result(None)
    assert activity.idle() is not None


class Wires:
    """Stands for all groups of a process: tells of collectives, and how much of theirs is still on its way."""

    activity: Activity | None = None
    left = 0

    def unsent(self) -> int:
        return self.left


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with closing(left), closing(right):
        yield left, right


def test_nothing_is_sent_beside_a_collective_nor_before_it_has_arrived(pair):
    wires = Wires()
    pacer = Pacer(wires, look=lambda: None, hurry=lambda: False)
    work, _ = issue(wires.activity)
    allowed: list[int] = []
    asking = threading.Thread(target=lambda: allowed.append(pacer.pace(pair[0], 1 << 20)))
    asking.start()
    asking.join(0.15)
    assert allowed == []
    wires.left = 1 << 20
    work.future.set_result(None)
    asking.join(0.15)
    assert allowed == []
    wires.left = 0
    asking.join(5)
    assert len(allowed) == 1 and 0 < allowed[0] <= 1 << 20


def test_in_a_hurry_it_goes_beside_collectives(pair):
    wires = Wires()
    pacer = Pacer(wires, look=lambda: None, hurry=lambda: True)
    issue(wires.activity)
    assert pacer.pace(pair[0], 1000) == 1000
    assert pacer.hurried_bytes == 1000


def test_beside_a_collective_that_stands_still_it_goes_on(pair, monkeypatch):
    """It waits for a rank, and that one may wait for what is to be sent here."""
    monkeypatch.setattr("regrow.run.pacing._STANDS_STILL_S", 0.2)
    wires = Wires()
    wires.left = 1 << 20
    pacer = Pacer(wires, look=lambda: None, hurry=lambda: False)
    began = time.monotonic()
    issue(wires.activity)
    threading.Timer(0.4, setattr, (wires, "left", 0)).start()  # until then it is the network that it waits for
    assert pacer.pace(pair[0], 1000) == 1000
    assert time.monotonic() - began > 0.35
    pacer.spans_s = (1.0,)
    pacer.until_room(0.1)


def test_the_end_of_a_generation_ends_the_wait(pair):
    wires = Wires()
    over = threading.Event()

    def look() -> None:
        if over.is_set():
            raise PeerLost("over")

    pacer = Pacer(wires, look=look, hurry=lambda: False)
    issue(wires.activity)
    threading.Timer(0.1, over.set).start()
    with pytest.raises(PeerLost):
        pacer.pace(pair[0], 1000)
    with pytest.raises(PeerLost):
        pacer.spans_s = (1.0,)
        pacer.until_room(0.1)


def test_no_more_is_sent_than_the_span_has_room_for(pair):
    wires = Wires()
    over = threading.Event()

    def look() -> None:
        if over.is_set():
            raise PeerLost("over")

    pacer = Pacer(wires, look=look, hurry=lambda: False)
    pacer.bytes_s, pacer.spans_s, pacer._share = 10e6, (0.4, 5.0), 0.4
    sent = 0

    def keep_sending() -> None:
        nonlocal sent
        with contextlib.suppress(PeerLost):
            while True:
                count = pacer.pace(pair[0], (1 << 40) - sent)
                pair[0].sendall(bytes(count))
                sent += count

    def keep_reading() -> None:
        while pair[1].recv(1 << 20):
            pass

    threads = [threading.Thread(target=each) for each in (keep_sending, keep_reading)]
    for each in threads:
        each.start()
    time.sleep(0.22)  # of the span's 0.4 s, 0.16 s may be used
    within = sent
    time.sleep(0.15)
    after = sent
    work, _ = issue(wires.activity)
    work.future.set_result(None)  # the next one has room
    time.sleep(0.1)
    over.set()
    threads[0].join(5)
    pair[0].shutdown(socket.SHUT_RDWR)
    threads[1].join(5)
    assert 0 < within == after < sent


def test_how_often_is_said_with_the_numbers():
    pacer = Pacer(Wires(), look=lambda: None, hurry=lambda: False)
    assert pacer.proposal(1 << 30, 1) == 1  # nothing is known yet
    pacer.spans_s, pacer.bytes_s = (0.5, 0.5), 1e8
    assert pacer.proposal(1 << 20, 1) == 1
    assert pacer.proposal(200_000_000, 1) == 3  # 2 s of traffic, 0.8 s of usable spans in each step
    said = pacer.explain(3, 200_000_000)
    assert "every 3 steps" in said and "200.00 MB" in said and "100.00 MB/s" in said and "1.000 s" in said


def test_a_network_that_takes_nothing_for_a_moment_is_not_taken_for_dead(monkeypatch):
    """Over a slow one, the first of what was sent may be on its way for longer than is looked at."""
    pacer = Pacer(Wires(), look=lambda: None, hurry=lambda: False)
    on_its_way = iter([0, 0, *[1_300_000] * 40])
    monkeypatch.setattr("regrow.run.pacing.outgoing", lambda connection: next(on_its_way, 0))
    connection, left = None, 2_000_000
    began = time.monotonic()
    while left:
        left -= pacer.pace(connection, left)
    assert time.monotonic() - began < 10
    assert pacer.bytes_s is None or pacer.bytes_s > 10_000


def test_what_goes_at_once_is_measured_too(monkeypatch):
    """Where no span is long enough to learn from, nothing else would ever tell how slow the network is."""
    pacer = Pacer(Wires(), look=lambda: None, hurry=lambda: True)
    monkeypatch.setattr("regrow.run.pacing.outgoing", lambda connection: 0)
    left = 2_000_000
    while left:
        sent = pacer.pace(None, left)
        time.sleep(sent / 10e6)
        left -= sent
    assert pacer.bytes_s == pytest.approx(10e6, rel=0.3)
