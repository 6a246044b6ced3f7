"""Snapshots in another host's memory, over real sockets: put, got back, torn, damaged, asked for by strangers."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import xxhash

from regrow import wire
from regrow.ids import Step
from regrow.peer.client import Client, Refused
from regrow.peer.keeper import Keeper, kept
from regrow.peer.memory import Buffer, Layout, Shelf, verify

TOKEN = "a secret"


class Said(list):
    """What the keeper told, and a way to wait for it."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def __call__(self, text):
        with self.changed:
            self.append(text)
            self.changed.notify_all()

    def wait_for(self, part):
        with self.changed:
            assert self.changed.wait_for(lambda: any(part in text for text in self), 10), list(self)


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def keeper(tmp_path, said):
    keeper = Keeper(tmp_path / "kept", "127.0.0.1", TOKEN, said)
    yield keeper
    keeper.close()


@pytest.fixture
def client(keeper):
    client = Client(keeper.address, TOKEN, lambda: None)
    yield client
    client.close()


def snapshot(path, step, *, sizes=(10, 0, 100_000, 1 << 20), generation=0) -> tuple[Buffer, Layout, dict]:
    """Return a snapshot in memory of this host."""
    buffer, layout = Buffer(path), Layout.of(sizes)
    for place in buffer.open(layout):
        place[:] = os.urandom(len(place))
    buffer.seal(layout, {"step": step, "parts": [[size, 0] for size in sizes]})
    _, parts = buffer.read("it")
    index = {
        "step": step,
        "generation": generation,
        "parts": [[len(part), xxhash.xxh3_64_intdigest(bytes(part))] for part in parts],
    }
    buffer.seal(layout, index)
    return buffer, layout, index


def content(buffer: Buffer) -> list[bytes]:
    index, parts = buffer.read("it")
    verify(index, [memoryview(bytes(part)) for part in parts], "it")
    return [bytes(part) for part in parts]


def test_what_is_put_comes_back(tmp_path, keeper, client):
    buffer, layout, index = snapshot(tmp_path / "mine", 7)
    client.put(3, 0, buffer, layout, index)
    assert {rank: [*shelf.whole()] for rank, shelf in kept(tmp_path / "kept").items()} == {3: [7]}
    back = Buffer(tmp_path / "back")
    client.get(3, Step(7), back)
    assert back.step() == 7 and content(back) == content(buffer)


def test_the_last_two_are_kept(tmp_path, client):
    for step in (1, 2, 3):
        client.put(0, 0, *snapshot(tmp_path / "mine", step))
    assert sorted(kept(tmp_path / "kept")[0].whole()) == [2, 3]
    client.drop_after(0, 1, Step(2))
    assert sorted(kept(tmp_path / "kept")[0].whole()) == [2]
    with pytest.raises(Refused, match="step 3 of rank 0 is not kept here"):
        client.get(0, Step(3), Buffer(tmp_path / "back"))


def test_a_sender_that_dies_leaves_what_was_there(tmp_path, keeper, client, said):
    client.put(0, 0, *snapshot(tmp_path / "mine", 1))
    client.put(0, 0, *snapshot(tmp_path / "mine", 2))
    client.close()
    torn = socket.create_connection(keeper.address)
    torn.sendall(wire.encode({"type": "hello", "token": TOKEN}))
    torn.sendall(
        wire.encode({"type": "put", "rank": 0, "generation": 0, "step": 3, "sizes": [1000], "index_checksum": 0})
    )
    assert wire.recv_frame(torn).head["type"] == "ready"
    torn.sendall(b"x" * 500)
    torn.close()
    said.wait_for("in the middle of a snapshot")
    assert [*kept(tmp_path / "kept")[0].whole()] == [2]


def test_what_is_there_already_is_not_taken_in_again(tmp_path, keeper, client, said):
    """After a recovery everyone puts the step again that all go on at: it may be the only one that all have."""
    buffer, layout, index = snapshot(tmp_path / "mine", 1)
    client.put(0, 0, buffer, layout, index)
    client.put(0, 1, buffer, layout, index, lambda *_: pytest.fail("it was sent again"))
    assert [*kept(tmp_path / "kept")[0].whole()] == [1]
    with (tmp_path / "kept" / "rank0.0").open("r+b") as file:
        file.seek(layout.offsets[3])
        file.write(b"damage")
    client.put(0, 1, buffer, layout, index)
    said.wait_for("the snapshot of rank 0 at step 1 is damaged: part 3 does not match its checksum; it is taken in")
    assert content(kept(tmp_path / "kept")[0].whole()[Step(1)]) == content(buffer)
    other, _, other_index = snapshot(tmp_path / "other", 1)
    client.put(0, 1, other, layout, other_index)
    assert content(kept(tmp_path / "kept")[0].whole()[Step(1)]) == content(other)


def test_only_a_past_that_was_given_up_is_dropped(tmp_path, keeper, client):
    """A keeper that could not be reached for a while is greeted again, in the same generation or late."""
    client.put(0, 4, *snapshot(tmp_path / "mine", 60, generation=4))
    client.put(0, 5, *snapshot(tmp_path / "mine", 80, generation=5))
    again, late = (Client(keeper.address, TOKEN, lambda: None) for _ in range(2))
    again.drop_after(0, 5, Step(40))
    assert sorted(kept(tmp_path / "kept")[0].whole()) == [80]
    again.close()
    with pytest.raises(OSError):
        late.drop_after(0, 4, Step(0))
    assert sorted(kept(tmp_path / "kept")[0].whole()) == [80]
    late.close()


def test_damage_on_the_way_is_found(tmp_path, client, said):
    buffer, layout, index = snapshot(tmp_path / "mine", 1)
    client.put(0, 0, buffer, layout, index)
    index = {**index, "step": 2, "parts": [[size, digest ^ 1] for size, digest in index["parts"]]}
    with pytest.raises(Refused, match="the snapshot of rank 0 at step 2 is damaged: part 0"):
        client.put(0, 0, buffer, layout, index)
    assert [*kept(tmp_path / "kept")[0].whole()] == [1]
    said.wait_for("it is not kept")
    client.put(0, 0, *snapshot(tmp_path / "mine", 3))  # the connection goes on


def test_a_newer_generation_ends_the_writer_before_it(tmp_path, keeper):
    old, new = (Client(keeper.address, TOKEN, lambda: None) for _ in range(2))
    old.put(0, 1, *snapshot(tmp_path / "mine", 1))
    new.put(0, 2, *snapshot(tmp_path / "mine", 2))
    with pytest.raises(OSError):
        old.put(0, 1, *snapshot(tmp_path / "mine", 9))
    assert sorted(kept(tmp_path / "kept")[0].whole()) == [1, 2]
    late = Client(keeper.address, TOKEN, lambda: None)
    with pytest.raises(OSError):
        late.put(0, 1, *snapshot(tmp_path / "mine", 9))
    assert sorted(kept(tmp_path / "kept")[0].whole()) == [1, 2]
    for client in (old, new, late):
        client.close()


def ended(connection: socket.socket) -> bool:
    """Whether the other side says nothing and closes; with bytes unread, that is a reset."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_sent_away_and_named(tmp_path, keeper, client, said):
    client.put(0, 0, *snapshot(tmp_path / "mine", 1))
    stranger = Client(keeper.address, "a guess", lambda: None)
    with pytest.raises(OSError):
        stranger.get(0, Step(1), Buffer(tmp_path / "stolen"))
    said.wait_for("sent away from the keeper: its token is not this run's")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0\0\0\2\0\0\0\0{}"):
        with socket.create_connection(keeper.address) as other:
            other.sendall(garbage)
            other.settimeout(10)
            assert ended(other)
    with socket.create_connection(keeper.address) as other:  # one that knows the token, and talks nonsense
        other.sendall(wire.encode({"type": "hello", "token": TOKEN}))
        other.sendall(wire.encode({"type": "put", "rank": 0, "generation": 0, "step": 3, "sizes": [-5]}))
        other.settimeout(10)
        assert ended(other)
    said.wait_for("not the parts of a snapshot")
    back = Buffer(tmp_path / "back")
    client.get(0, Step(1), back)
    assert back.step() == 1
    stranger.close()


def test_pace(tmp_path, client):
    """What is sent, and when, is the sender's to say."""
    buffer, layout, index = snapshot(tmp_path / "mine", 1)
    asked = []

    def pace(_, left: int) -> int:
        asked.append(left)
        return 100_000

    client.put(0, 0, buffer, layout, index, pace)
    assert asked[0] == layout.end - 4096 and len(asked) >= len(range(0, asked[0], 100_000))
    assert content(Shelf(tmp_path / "kept" / "rank0").whole()[Step(1)]) == content(buffer)
