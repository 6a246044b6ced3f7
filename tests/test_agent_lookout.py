"""What counts as an agent's end, and what is done about it."""

import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket

import pytest

from agent_harness import AT_ONCE_S
from regrow.agent import porter
from regrow.agent.leader import HOSTS, LEADER_KEY
from regrow.agent.lookout import Lookout, Place, whom
from regrow.agent.presence import Presence, until_gone
from regrow.agent.store import MemoryStore
from regrow.wire import encode

TOKEN = "a secret of all"
WHILE_S = 0.6
"""Nothing may be concluded in this time, though much is tried: who does not answer is given up after a tenth of it."""


class Process:
    """A process that can be looked at, and nothing else. It counts whom it has welcomed."""

    def __init__(self):
        self._welcomed = mmap.mmap(-1, 1)
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                porter.encode = self._count
                asyncio.run(self._live(writing))
            finally:
                os._exit(1)
        os.close(writing)
        self.port = int(os.read(reading, 10))
        os.close(reading)

    def _count(self, head):
        self._welcomed[0] += 1
        return encode(head)

    @staticmethod
    async def _live(writing):
        os.write(writing, b"%d" % await Presence(TOKEN, lambda text: None).start("127.0.0.1"))
        await asyncio.sleep(60)

    async def welcomed(self, count):
        async with asyncio.timeout(10):
            while self._welcomed[0] < count:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # and it has arrived

    @property
    def address(self):
        return "127.0.0.1", self.port

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def process():
    one = Process()
    yield one
    one.kill()


def looking(address, token=TOKEN):
    return asyncio.create_task(until_gone(address, token, WHILE_S / 10))


async def undecided(task):
    await asyncio.wait({task}, timeout=WHILE_S)
    assert not task.done()


def test_a_process_that_was_killed_is_gone_at_once_and_one_that_is_stopped_is_not(process):
    async def check():
        task = looking(process.address)
        await process.welcomed(1)
        process.signal(signal.SIGSTOP)
        late = looking(process.address)  # its kernel takes the connection, and nobody greets
        await undecided(task)
        process.signal(signal.SIGCONT)
        await undecided(late)
        process.kill()
        async with asyncio.timeout(AT_ONCE_S):
            await asyncio.gather(task, late)

    asyncio.run(check())


def test_who_was_never_spoken_to_is_not_judged(process):
    async def check():
        tasks = [looking(process.address, "of another run"), looking(("127.0.0.1", 1))]
        await undecided(tasks[0])
        process.kill()
        await undecided(tasks[0])
        assert not tasks[1].done(), "a refusal alone may come from anybody"
        for task in tasks:
            task.cancel()

    asyncio.run(check())


@pytest.mark.parametrize("how", ["closed", "closed, and no answer", "reset, and refused"])
def test_a_connection_that_ends_proves_nothing_alone(how):
    async def check():
        there, count, answers = Presence(TOKEN, lambda text: None), 0, asyncio.Event()

        async def accept(reader, writer):
            nonlocal count
            count += 1
            if count == 1:
                asyncio.get_running_loop().call_later(0.05, end, writer)
            elif how == "closed, and no answer":
                await answers.wait()
            await there._accept(reader, writer)

        def end(writer):
            if how == "reset, and refused":  # a firewall can do both
                server.close()
                linger = bytes([1, *7 * [0]])
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        task = looking(server.sockets[0].getsockname())
        await undecided(task)
        assert (count == 1) == (how == "reset, and refused")
        answers.set()
        task.cancel()
        server.close()
        await there.close()

    asyncio.run(check())


def test_the_lease_of_whoever_is_gone_ends_and_no_other(process):
    async def check():
        store, departed = MemoryStore(), []
        leases = {name: await store.grant(60) for name in ("gone", "own", "other", "again")}

        async def place(node, name, port):
            told = {"session": name, "address": "127.0.0.1", "presence": port, "lease": leases[name].number}
            await store.put(f"{HOSTS}{node}", json.dumps(told).encode(), leases[name])

        async with asyncio.timeout(20):
            await place(0, "gone", process.port)
            await place(1, "own", 1)
            await place(2, "other", None)
            await store.put(LEADER_KEY, b"gone", leases["gone"])
            lookout = asyncio.create_task(Lookout(store, 1, TOKEN, 1.0, departed.append).run())
            await process.welcomed(1)
            await place(0, "again", process.port)  # the process is there in another session now
            await process.welcomed(2)
            process.kill()
            while await store.get(f"{HOSTS}0") is not None:
                await asyncio.sleep(0.01)
            assert departed == ["again"]
            assert [await leases[name].keep() for name in leases] == [True, True, True, False]
            lookout.cancel()
            await asyncio.gather(lookout, return_exceptions=True)

    asyncio.run(check())


def test_the_leader_looks_at_all_and_all_at_the_leader():
    places = {node: Place(f"s{node}", "a", 1, node) for node in range(0, 40, 2)}
    assert {place.lease for place in whom(places, 6, "s6")} == set(places) - {6}
    assert {place.lease for place in whom(places, 6, "s20")} == {8, 10, 12, 14, 20}
    assert {place.lease for place in whom(places, 36, "")} == {38, 0, 2, 4}
    assert {place.lease for place in whom(places, 7, "s7")} == {8, 10, 12, 14}
    looked_at = {place for node in places for place in whom(places, node, "s0")}
    assert looked_at == set(places.values())
    assert whom({3: places[2]}, 3, "s2") == set()
