"""The contract of the control store, for every implementation, and the workers' view of it."""

import asyncio
import contextlib
import functools
import inspect
import json
import socket
import types
import uuid

import pytest

from regrow.agent import kv
from regrow.agent.store import LeaseLost, MemoryStore, StoreLost
from regrow.agent.store_etcd import EtcdStore
from regrow.agent.store_tcp import StoreServer, TcpStore
from regrow.wire import Frame

TOKEN = "secret"


class ManualClock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def time(self):
        return self.now

    def call_at(self, when, callback):
        timer = types.SimpleNamespace(when=when, callback=callback)
        timer.cancel = lambda: timer in self.timers and self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def _fire(self, until):
        while due := [timer for timer in self.timers if timer.when <= until]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            first.callback()

    async def passes(self, seconds):
        self._fire(self.now + seconds)
        self.now += seconds

    def stalls(self, seconds):
        """All that was due meanwhile happens too late."""
        self.now += seconds
        self._fire(self.now)


async def nothing(node, session):
    pass


@contextlib.asynccontextmanager
async def memory():
    clock = ManualClock()
    yield MemoryStore(clock), clock.passes


@contextlib.asynccontextmanager
async def tcp():
    clock = ManualClock()
    server = StoreServer(MemoryStore(clock), TOKEN, nothing, print)
    port = await server.start("127.0.0.1", 0)
    store = await TcpStore.connect("127.0.0.1", port, TOKEN)
    try:
        yield store, clock.passes
    finally:
        await store.close()
        await server.close()


@contextlib.asynccontextmanager
async def in_etcd(cluster):
    store = EtcdStore(cluster.endpoints, f"/test/{uuid.uuid4().hex}/", timeout_s=12)
    try:
        yield store, asyncio.sleep
    finally:
        await store.delete("", prefix=True)
        await store.close()


@pytest.fixture(params=["memory", "tcp", "etcd"])
def run(request):
    """Run a coroutine function with a store of each kind, under a deadline; it may ask for time to pass, too."""
    if request.param == "etcd":
        make = functools.partial(in_etcd, request.getfixturevalue("etcd"))
    else:
        make = {"memory": memory, "tcp": tcp}[request.param]

    def runner(test):
        async def main():
            async with asyncio.timeout(20), make() as (store, passes):
                await (test(store, passes) if len(inspect.signature(test).parameters) == 2 else test(store))

        asyncio.run(main())

    return runner


def test_contract(run):
    async def check(store):
        assert await store.get("a") is None
        one = await store.put("a", b"1")
        assert await store.get("a") == (b"1", one)
        assert await store.compare_and_set("a", 0, b"x") is None
        two = await store.compare_and_set("a", one, b"2")
        assert two > one
        assert await store.compare_and_set("a", one, b"x") is None
        assert await store.compare_and_set("b", 0, b"") > two
        assert (await store.get("b")).value == b""
        assert sorted(await store.keys("")) == ["a", "b"]
        assert await store.delete("a") == 1
        assert await store.delete("a") == 0
        assert await store.compare_and_set("a", two, b"x") is None
        assert await store.compare_and_set("a", 0, b"3") > two
        assert await store.delete("", prefix=True) == 2

    run(check)


def test_watch_shows_what_is_there_and_then_every_change(run):
    async def check(store):
        await store.put("w/a", b"1")
        await store.put("other", b"")
        seen = []

        async def watch():
            async for change in store.watch("w/"):
                seen.append((change.key, change.value))
                if len(seen) == 4:
                    return

        task = asyncio.create_task(watch())
        while not seen:
            await asyncio.sleep(0.01)
        await store.put("w/b", b"2")
        await store.delete("w/a")
        await store.put("w/b", b"")
        await task
        assert seen == [("w/a", b"1"), ("w/b", b"2"), ("w/a", None), ("w/b", b"")]

    run(check)


def test_concurrent_compare_and_set_loses_nothing(run):
    async def check(store):
        await asyncio.gather(*(kv._add(store, "n", 1) for _ in range(20)))
        assert (await store.get("n")).value == b"20"

    run(check)


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.01)


def test_what_hangs_on_a_lease_goes_with_it(run):
    async def check(store, passes):
        lease, other = await store.grant(3), await store.grant(60)
        assert lease.ttl_s == 3
        seen = []

        async def watch():
            async for change in store.watch("w/"):
                seen.append((change.key, change.value))

        task = asyncio.create_task(watch())
        await store.put("w/a", b"1", lease)
        assert await store.compare_and_set("w/b", 0, b"2", lease)
        await store.put("w/c", b"3")
        await store.put("w/d", b"4", other)

        async def told(count):
            return len(seen) == count

        await until(lambda: told(4))
        await passes(2)
        assert await lease.keep()
        await passes(2)
        assert len(await store.keys("w/")) == 4
        await passes(2)
        await until(lambda: told(6))
        assert seen[4:] == [("w/a", None), ("w/b", None)]
        assert sorted(await store.keys("w/")) == ["w/c", "w/d"]
        assert not await lease.keep()
        for write in (store.put("w/x", b"", lease), store.compare_and_set("w/x", 0, b"", lease)):
            with pytest.raises(LeaseLost):
                await write
        assert await store.get("w/x") is None
        assert await store.compare_and_set("w/a", 0, b"again")
        await lease.revoke()
        await other.revoke()
        assert sorted(await store.keys("w/")) == ["w/a", "w/c"]
        task.cancel()

    run(check)


def test_a_key_hangs_on_the_lease_of_its_last_write(run):
    async def check(store):
        one, two = await store.grant(60), await store.grant(60)
        for key in ("free", "moved", "stays"):
            await store.put(key, b"", one)
        version = await store.put("free", b"1")
        assert await store.compare_and_set("moved", (await store.get("moved")).version, b"", two)
        await store.revoke(one.number)  # anybody may, who knows its number
        await store.revoke(one.number)
        assert not await one.keep()
        assert sorted(await store.keys("")) == ["free", "moved"]
        assert await store.get("free") == (b"1", version)
        await store.put("gone", b"", two)
        await store.delete("gone")
        await store.put("gone", b"but back")
        await two.revoke()
        assert sorted(await store.keys("")) == ["free", "gone"]

    run(check)


def test_leases_are_not_lost_while_the_store_itself_stands_still():
    async def check():
        clock = ManualClock()
        store = MemoryStore(clock)
        lease = await store.grant(2)
        await store.put("a", b"", lease)
        clock.stalls(10)
        assert await store.get("a") is not None
        await clock.passes(2)
        assert await store.get("a") is None

    asyncio.run(check())


def test_leases_run_by_the_loops_clock():
    async def check():
        store = MemoryStore()
        await store.put("a", b"", await store.grant(0.05))
        assert await store.get("a") is not None

        async def gone():
            return await store.get("a") is None

        await asyncio.wait_for(until(gone), 10)
        for ttl_s in (0, -1):
            with pytest.raises(ValueError, match="positive"):
                await store.grant(ttl_s)

    asyncio.run(check())


def test_lost_connection_wakes_everyone():
    async def check():
        server = StoreServer(MemoryStore(), TOKEN, nothing, print)
        port = await server.start("127.0.0.1", 0)
        store = await TcpStore.connect("127.0.0.1", port, TOKEN)
        await store.put("a", b"")

        async def watch():
            async for _ in store.watch("w"):
                pass

        task = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await server.close()
        with pytest.raises(StoreLost):
            await asyncio.wait_for(task, 10)
        with pytest.raises(StoreLost):
            await store.get("a")

    asyncio.run(check())


def test_only_a_connection_that_was_closed_tells_of_the_end_of_its_node():
    async def check():
        gone = []

        async def ended(node, session):
            gone.append((node, session))

        server = StoreServer(MemoryStore(), TOKEN, ended, print)
        port = await server.start("127.0.0.1", 0)
        stores = [await TcpStore.connect("127.0.0.1", port, TOKEN) for _ in range(3)]
        for node, store in enumerate(stores):
            await store.joined(node, f"session {node}")
            await store.put("a", b"")
        await stores[0].close()  # it says goodbye
        writers = [store._presence._writer for store in stores[1:]]
        writers[0].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *7 * [0]]))
        writers[0].transport.abort()  # a reset, as by a router that forgot the connection
        await asyncio.sleep(0.2)
        assert gone == []
        writers[1].close()  # as the kernel does when the process is killed
        while not gone:
            await asyncio.sleep(0.01)
        await server.close()
        assert gone == [(2, "session 2")]

    asyncio.run(check())


def test_wrong_token_is_refused():
    async def check():
        server = StoreServer(MemoryStore(), TOKEN, nothing, print)
        port = await server.start("127.0.0.1", 0)
        with pytest.raises(PermissionError):
            await TcpStore.connect("127.0.0.1", port, "guess")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        await server.close()

    asyncio.run(check())


async def ask(store, op, blob=b"", **fields):
    frame = await kv.answer(store, Frame({"type": "store", "id": 7, "op": op, **fields}, blob))
    head_len, blob_len = int.from_bytes(frame[:4], "big"), int.from_bytes(frame[4:8], "big")
    head = json.loads(frame[8 : 8 + head_len])
    assert head["type"] == "reply" and head["id"] == 7 and len(frame) == 8 + head_len + blob_len
    return head["ok"], head["value"], head["error"], frame[8 + head_len :]


def test_workers_requests(run):
    async def check(store):
        assert await ask(store, "set", b"v", key="k") == (True, None, None, b"")
        assert await ask(store, "get", key="k", timeout_s=1) == (True, None, None, b"v")
        assert (await ask(store, "add", key="n", amount=2))[1] == 2
        assert (await ask(store, "add", key="n", amount=3))[1] == 5
        assert (await ask(store, "get", key="n", timeout_s=1))[3] == b"5"
        assert (await ask(store, "check", keys=["k", "n"]))[1] is True
        assert (await ask(store, "check", keys=["k", "none"]))[1] is False
        assert (await ask(store, "num_keys"))[1] == 2
        assert sorted((await ask(store, "list_keys"))[1]) == ["k", "n"]
        assert (await ask(store, "compare_set", b"" + b"new", key="c", expected_len=0))[3] == b"new"
        assert (await ask(store, "compare_set", b"old" + b"x", key="c", expected_len=3))[3] == b"new"
        assert (await ask(store, "compare_set", b"new" + b"x", key="c", expected_len=3))[3] == b"x"
        assert (await ask(store, "compare_set", b"e" + b"x", key="absent", expected_len=1))[3] == b"e"
        assert (await ask(store, "delete", key="c"))[1] is True
        assert (await ask(store, "delete", key="c"))[1] is False
        await kv.purge(store, "k")
        assert (await ask(store, "list_keys"))[1] == ["n"]

    run(check)


def test_get_and_wait_wait_for_the_key_or_the_deadline(run):
    async def check(store):
        waiting = asyncio.create_task(ask(store, "get", key="late", timeout_s=15))
        other = asyncio.create_task(ask(store, "wait", keys=["late", "later"], timeout_s=15))
        await asyncio.sleep(0.05)
        await ask(store, "set", b"not it", key="later")
        await ask(store, "set", b"it", key="late")
        assert (await waiting)[3] == b"it"
        assert (await other)[0] is True
        ok, _, error, _ = await ask(store, "get", key="never", timeout_s=0.01)
        assert not ok and error.startswith("timeout: never")
        ok, _, error, _ = await ask(store, "wait", keys=["never"], timeout_s=0.01)
        assert not ok and error.startswith("timeout")
        assert (await ask(store, "dance"))[0] is False
        assert (await ask(store, "get"))[0] is False

    run(check)
