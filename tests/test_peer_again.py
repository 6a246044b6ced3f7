"""A keeper that was given up is tried again, and holds nobody up meanwhile."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from regrow.ids import Rank, Step
from regrow.peer.keeper import Keeper, kept
from regrow.run import again
from regrow.run.copies import Copies, Host
from test_peer_keeper import TOKEN, Said, snapshot


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(again, "FIRST_S", 0.1)


def copies_of(tmp_path, said, address) -> Copies:
    host = Host(node=0, keeper=("127.0.0.1", 1), kept=tmp_path / "kept0", copies=2)
    copies = Copies(Rank(0), host, TOKEN, superseded=lambda: False, say=said, event=lambda name, **_: said(name))
    keepers = [["127.0.0.1", 1], list(address)]
    copies.heard([{"node": node, "keeper": keeper, "domain": None} for node, keeper in enumerate(keepers)])
    assert copies.resume(0, Step(0)) == 2
    return copies


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "regrow-keeper-again"]


def test_a_keeper_comes_back(tmp_path, quick):
    said, step = Said(), 0
    keeper = Keeper(tmp_path / "kept1", "127.0.0.1", TOKEN, lambda _: None)
    copies = copies_of(tmp_path, said, keeper.address)

    def put() -> float:
        nonlocal step
        step += 1
        began = time.monotonic()
        copies.put(snapshot(tmp_path / f"mine{step % 2}", step, sizes=(10, 1000))[0])
        return time.monotonic() - began

    put()
    keeper.close()
    # for a while somebody listens there who never says a word: only the thread that seeks waits for him
    silent = socket.create_server(keeper.address)
    assert put() < 1.0
    said.wait_for("1 of 2 hosts do")
    heard, _ = silent.accept()
    assert all(put() < 1.0 for _ in range(5))
    assert [text for text in said if "hosts do" in text][1:] == []
    heard.close()
    silent.close()
    keeper = Keeper(tmp_path / "kept1", "127.0.0.1", TOKEN, lambda _: None, keeper.address[1])
    try:
        deadline = time.monotonic() + 10
        while "snapshot_copy_regained" not in said and time.monotonic() < deadline:
            put()
            time.sleep(0.02)
        put()
        assert [text for text in said if "hosts do" in text][1:] == [
            "host 1 keeps this rank's snapshots again: 2 of 2 hosts do"
        ]
        assert sorted(kept(tmp_path / "kept1")[0].whole()) == [step - 1, step]
    finally:
        copies.close()
        keeper.close()


def test_the_end_of_a_generation_ends_the_search(tmp_path, quick):
    """Also while the thread waits for an answer that does not come."""
    said = Said()
    keeper = Keeper(tmp_path / "kept1", "127.0.0.1", TOKEN, lambda _: None)
    copies = copies_of(tmp_path, said, keeper.address)
    keeper.close()
    with socket.create_server(keeper.address) as silent:
        copies.put_small("start", Step(1), b"own")
        said.wait_for("1 of 2 hosts do")
        heard, _ = silent.accept()
        assert heard.recv(1)
        assert threads()
        copies.sever()
        deadline = time.monotonic() + 10
        while threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not threads()
        heard.close()
    copies.close()


def test_one_that_answers_and_fails_again_is_left_alone_longer_and_longer(quick):
    class Connection:
        def end(self) -> None: ...

        def close(self) -> None: ...

    asked: list[float] = []

    def greet(_) -> None:
        asked.append(time.monotonic())
        if len(asked) % 2:
            raise OSError("not yet")

    seeker = again.Seeker(lambda node: Connection(), greet)  # type: ignore[arg-type, return-value]
    began = time.monotonic()
    for _ in range(2):
        seeker.seek(3)
        deadline = time.monotonic() + 10
        while not (found := seeker.reached()) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [*found] == [3]
    pauses = [later - earlier for earlier, later in zip([began, *asked], asked, strict=False)]
    assert len(pauses) == 4
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.8), strict=True)), pauses
    seeker.stop()
