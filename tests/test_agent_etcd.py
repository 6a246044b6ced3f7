"""The store in etcd when members of it are killed, stopped or unreachable, and what it does with large values."""

import asyncio
import base64
import contextlib
import random
import time
import uuid

import pytest

from etcd_cluster import Watching, until
from regrow.agent import etcd_values
from regrow.agent.store import LeaseLost, StoreLost
from regrow.agent.store_etcd import EtcdStore

TIMEOUT_S = 12.0


@pytest.fixture
def run(etcd):
    """Run a coroutine function with a store of its own, under a deadline."""

    def runner(test, deadline_s=60.0, endpoints=None, timeout_s=TIMEOUT_S):
        async def main():
            store = EtcdStore(endpoints or etcd.endpoints, f"/test/{uuid.uuid4().hex}/", timeout_s)
            try:
                async with asyncio.timeout(deadline_s):
                    await test(store)
            finally:
                with contextlib.suppress(StoreLost):
                    await store.close()

        asyncio.run(main())

    return runner


def test_killed_leader_in_the_middle_of_writes_and_watches(etcd, run):
    async def check(store):
        watching = Watching(store, "n/")
        counted = {}

        async def write(name, count):
            version = 0
            for number in range(count):
                version = await store.compare_and_set(f"n/{name}", version, b"%d" % number)
                assert version is not None
                counted[name] = number

        writers = [asyncio.create_task(write(name, 60)) for name in "abc"]
        await until(lambda: len(counted) == 3 and min(counted.values()) >= 15)
        leader = await asyncio.to_thread(etcd.leader)
        etcd.kill(leader)
        await asyncio.gather(*writers)
        await watching.told(180)
        for name in "abc":
            assert [int(c.value) for c in watching.changes if c.key == f"n/{name}"] == list(range(60))
        versions = [change.version for change in watching.changes]
        assert versions == sorted(versions)
        await watching.close()

    run(check)


def test_members_killed_one_after_the_other_come_back(etcd, run):
    async def check(store):
        watching = Watching(store, "n")
        number = 0
        for member in (0, 1, 2):
            etcd.kill(member)
            for _ in range(5):
                await store.put("n", b"%d" % number)
                number += 1
            etcd.start(member)
            await asyncio.to_thread(etcd.until_whole)
        await watching.told(number)
        assert [int(change.value) for change in watching.changes] == list(range(number))
        await watching.close()

    run(check)


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_member_that_hangs_is_left_for_another(etcd, run, role):
    async def check(store):
        leader = await asyncio.to_thread(etcd.leader)
        victim = leader if role == "leader" else (leader + 1) % 3
        store._etcd._at = victim
        watching = Watching(store, "n")
        await store.put("n", b"0")
        await watching.told(1)
        etcd.stop(victim)
        begun = time.monotonic()
        other = EtcdStore(etcd.endpoints, store._layout._root.decode(), TIMEOUT_S)
        other._etcd._at = (victim + 1) % 3
        await other.put("n", b"1")  # so that the watch has to notice by itself
        await watching.told(2)
        await store.put("n", b"2")
        assert time.monotonic() - begun < TIMEOUT_S
        etcd.go_on(victim)
        await other.put("n", b"3")
        await watching.told(4)
        assert [change.value for change in watching.changes] == [b"0", b"1", b"2", b"3"]
        await other.close()
        await watching.close()

    run(check)


def test_without_a_majority_all_waits_end(etcd, run):
    async def check(store):
        await store.put("a", b"1")
        lease = await store.grant(60)
        watching = Watching(store, "a")
        await watching.told(1)
        etcd.kill(0)
        etcd.kill(1)
        begun = time.monotonic()

        async def lost(work):
            with pytest.raises(StoreLost, match="etcd did not answer within 3 s"):
                await work

        await asyncio.gather(lost(store.get("a")), lost(store.put("a", b"2")), lost(watching.told(2)))
        await lost(lease.keep())  # a leader that is alone renews leases for a second more, until it sees that it is
        assert time.monotonic() - begun < 4 * 3.0

    run(check, timeout_s=3.0)


def test_leases_live_through_a_leaders_death_only_if_kept(etcd, run):
    async def check(store):
        kept, left = await store.grant(3), await store.grant(3)
        watching = Watching(store, "l/")
        await store.put("l/kept", b"", kept)
        await store.put("l/left", b"", left)

        async def keep():
            while True:
                assert await kept.keep()
                await asyncio.sleep(0.5)

        keeping = asyncio.create_task(keep())
        etcd.kill(await asyncio.to_thread(etcd.leader))
        await watching.told(3)
        assert [(c.key, c.value is None) for c in watching.changes] == [
            ("l/kept", False), ("l/left", False), ("l/left", True),
        ]  # fmt: skip
        assert not keeping.done()
        assert not await left.keep()
        with pytest.raises(LeaseLost):
            await store.put("l/left", b"", left)
        keeping.cancel()
        await kept.revoke()
        await watching.told(4)
        await watching.close()

    run(check)


def test_lease_times_are_rounded_up(run):
    async def check(store):
        lease = await store.grant(2.2)
        assert lease.ttl_s == 3.0
        assert (await store.grant(0.1)).ttl_s >= 1.0
        with pytest.raises(ValueError, match="positive"):
            await store.grant(0)

    run(check)


def raw_keys(etcd, store):
    """What lies in etcd for a store, also what it does not show."""
    start = store._layout._root
    words = {key: base64.b64encode(value).decode() for key, value in (("key", start), ("range_end", start[:-1] + b"0"))}
    kvs = etcd.ask(0, "kv/range", **words, keys_only=True).get("kvs", [])
    return [base64.b64decode(kv["key"]).removeprefix(start) for kv in kvs]


def test_values_larger_than_a_request(etcd, run):
    async def check(store):
        large, other = random.Random(0).randbytes((2 << 20) + 7), random.Random(1).randbytes((1 << 20) + 1)
        watching = Watching(store, "v/")
        lease = await store.grant(60)
        version = await store.put("v/a", large)
        assert await store.get("v/a") == (large, version)
        assert sum(key.startswith(b"p/") for key in raw_keys(etcd, store)) == 3
        assert await store.compare_and_set("v/a", version + 1, large) is None
        assert sum(key.startswith(b"p/") for key in raw_keys(etcd, store)) == 3
        assert await store.compare_and_set("v/a", version, other, lease)
        assert sum(key.startswith(b"p/") for key in raw_keys(etcd, store)) == 2
        assert await store.keys("") == ["v/a"]
        await store.put("v/b", large, lease)
        await lease.revoke()
        assert not [key for key in raw_keys(etcd, store) if not key.startswith(b"w/")]
        await store.put("v/c", large)
        await store.put("v/c", b"small")
        await store.put("v/d", large)
        assert await store.delete("v/d") == 1
        await store.put("v/e", large)
        assert await store.delete("v/", prefix=True) == 2
        assert not [key for key in raw_keys(etcd, store) if not key.startswith(b"w/")]
        await watching.told(12)
        assert [c.value for c in watching.changes] == [
            large, other, large, None, None, large, b"small", large, None, large, None, None,
        ]  # fmt: skip
        await watching.close()
        assert raw_keys(etcd, store)
        await store.close()
        assert not raw_keys(etcd, store)

    run(check)


def test_large_values_written_against_each_other_stay_whole(run):
    async def check(store):
        values = [bytes([number]) * 200_000 for number in range(4)]
        await asyncio.gather(*(store.put("a", value) for value in values for _ in range(3)))
        assert (await store.get("a")).value in values

    run(check)


def test_watch_across_compaction(etcd, run):
    """What it was to go on from is forgotten: it tells what has changed, with deletions, and nothing twice."""

    async def check(store):
        watching = Watching(store, "w/")
        for key in "abc":
            await store.put(f"w/{key}", b"1")
        await watching.told(3)
        writing = EtcdStore(etcd.endpoints, store._layout._root.decode(), TIMEOUT_S)
        connect, blocked = store._etcd._connect, asyncio.Event()

        async def refused(member):
            if not blocked.is_set():
                raise ConnectionError("cut")
            return await connect(member)

        store._etcd._connect = refused
        for connection in list(store._etcd._open):
            store._etcd._drop(connection)
        await writing.put("w/a", b"2")
        await writing.delete("w/b")
        await writing.put("w/d", b"1")
        version = await writing.put("w/a", b"3")
        await asyncio.to_thread(etcd.ask, 0, "kv/compaction", revision=version, physical=True)
        blocked.set()
        await watching.told(6)
        told = [(change.key, change.value) for change in watching.changes]
        assert told[3:] == [("w/b", None), ("w/d", b"1"), ("w/a", b"3")]
        await writing.put("w/e", b"")
        await watching.told(7)
        assert watching.changes[-1].key == "w/e"
        await watching.close()
        await writing.close()

    run(check)


def test_many_keys_come_in_pages(run, monkeypatch):
    async def check(store):
        for number in range(7):
            await store.put(f"k/{number}", b"%d" % number)
        assert sorted(await store.keys("k/")) == [f"k/{number}" for number in range(7)]
        watching = Watching(store, "k/")
        await watching.told(7)
        assert [change.value for change in watching.changes] == [b"%d" % number for number in range(7)]
        await watching.close()

    monkeypatch.setattr(etcd_values, "_KEYS_AT_ONCE", 3)
    monkeypatch.setattr(etcd_values, "_VALUES_AT_ONCE", 3)
    run(check)


def test_nobody_there_and_nobody_who_answers(unanswered):
    async def check():
        store = EtcdStore([unanswered, ("127.0.0.1", 1)], "/test/", 1.0)
        begun = time.monotonic()
        with pytest.raises(StoreLost, match=r"etcd did not answer within 1 s \(the last attempt: 127\.0\.0\.1"):
            await store.get("a")
        assert time.monotonic() - begun < 3.0
        store.disconnect()

    asyncio.run(check())
