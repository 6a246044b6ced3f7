"""When a rank takes a checkpoint, and how long it waits for those of the others; the store is a dictionary."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from regrow.ids import Rank, Step
from regrow.run import commits
from regrow.run.commits import Checkpoints
from regrow.run.roles import Roles


class Store:
    """A link to a store that waits for nothing: whoever waits for what is not there is told at once."""

    def __init__(self):
        self.keys = set()
        self.waits = 0

    def ask(self, request, *, timeout_s):
        there = self.keys.issuperset(request.get("keys", ()))
        if request["op"] == "set":
            self.keys.add(request["key"])
        elif request["op"] == "wait":
            self.waits += 1
            if not there:
                return SimpleNamespace(head={"ok": False, "error": "not within the time"})
        return SimpleNamespace(head={"ok": True, "value": there})

    def send(self, head):
        pass


class Writer:
    """Writes nothing, and takes as long for it as the test wants."""

    def __init__(self):
        self.busy = False
        self.saved = []
        self.failure = "no room"

    def save(self, step, small):
        self.busy = True
        self.saved.append(step)

    def wait(self, timeout_s):
        return not self.busy

    def remove(self, step):
        pass


@pytest.fixture
def rank_0(tmp_path, monkeypatch):
    """The checkpoints of the first of two ranks, every five steps, with ``store``, ``writer`` and ``events``."""
    monkeypatch.setattr(commits, "_AGAIN_S", 0.001)
    roles = Roles([0, 1], ["rank 0", "rank 1"], "nonce", [], [])
    store, events, committed = Store(), [], []
    made = Checkpoints(
        tmp_path,
        Rank(0),
        roles,
        every=5,
        link=store,
        registry=None,
        on_committed=committed.append,
        say=lambda text: None,
        event=lambda name, **fields: events.append((name, fields.get("step"))),
    )
    made._writer = Writer()
    yield SimpleNamespace(checkpoints=made, store=store, writer=made._writer, events=events, committed=committed)
    made.close()


def written(rank, step, nbytes=1 << 20):
    rank.checkpoints._written(Step(step), nbytes, 0.1)
    rank.writer.busy = False


def rank_1(store, step, *, refuses=False):
    store.keys |= {f"checkpoint/nonce/{step}/refused"} if refuses else set()
    store.keys.add(f"checkpoint/nonce/{step}/1")


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_step_that_begins_again_does_not_refuse_its_own_checkpoint(rank_0):
    rank_0.checkpoints.at_start(Step(5), None)
    rank_0.checkpoints.at_start(Step(5), None)  # it is still being written
    assert rank_0.events == [("checkpoint_taken", 5)]
    written(rank_0, 5)
    until(lambda: rank_0.store.waits)
    rank_0.checkpoints.at_start(Step(5), None)  # it is written, and not yet by all
    assert rank_0.writer.saved == [5]
    rank_1(rank_0.store, 5)
    until(lambda: rank_0.committed == [5])


def test_another_step_is_skipped_while_one_is_being_written(rank_0):
    rank_0.checkpoints.at_start(Step(5), None)
    rank_0.checkpoints.at_start(Step(10), None)
    assert ("checkpoint_skipped", 10) in rank_0.events
    until(lambda: "checkpoint/nonce/10/refused" in rank_0.store.keys)


def test_a_checkpoint_that_could_not_be_written_is_tried_again(rank_0):
    rank_0.checkpoints.at_start(Step(5), None)
    written(rank_0, 5, nbytes=-1)
    rank_0.checkpoints.at_start(Step(5), None)
    assert rank_0.writer.saved == [5, 5]


def test_a_state_that_is_another_is_written_although_the_step_is_the_same(rank_0):
    rank_0.checkpoints.at_start(Step(5), None)
    written(rank_0, 5)
    rank_0.checkpoints.forget_all()
    rank_0.checkpoints.at_start(Step(5), None)
    assert rank_0.writer.saved == [5, 5]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_rank_that_comes_late_is_waited_for(rank_0, refuses):
    rank_0.checkpoints.at_start(Step(5), None)
    written(rank_0, 5)
    until(lambda: rank_0.store.waits >= 3)
    assert rank_0.committed == []
    rank_1(rank_0.store, 5, refuses=refuses)
    name = "checkpoint_refused" if refuses else "checkpoint_committed"
    until(lambda: (name, 5) in rank_0.events)
    assert rank_0.committed == ([] if refuses else [5])


def waiting():
    return [thread for thread in threading.enumerate() if thread.name == "regrow-commit"]


def test_nobody_waits_for_a_checkpoint_before_a_committed_one(rank_0):
    for step in (5, 10):
        rank_0.checkpoints.at_start(Step(step), None)
        written(rank_0, step)
    until(lambda: rank_0.store.waits >= 4)
    rank_1(rank_0.store, 10)
    until(lambda: not waiting())
    assert rank_0.committed == [10]


@pytest.mark.parametrize("end", ["close", "forget_all"])
def test_nobody_waits_when_it_is_over(rank_0, end):
    rank_0.checkpoints.at_start(Step(5), None)
    written(rank_0, 5)
    until(lambda: rank_0.store.waits >= 2)
    getattr(rank_0.checkpoints, end)()
    until(lambda: not waiting())
