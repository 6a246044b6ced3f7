"""Requests to etcd whose answer is lost, or that are carried out late: each is made once."""

import asyncio
import json
import uuid

import pytest

from etcd_cluster import Watching
from regrow.agent.store_etcd import EtcdStore

TIMEOUT_S = 12.0


class Proxy:
    """Stands before a member; ``rule(path)`` says per request: pass it, or lose the request, or its answer."""

    def __init__(self, endpoint, rule):
        self._endpoint = endpoint
        self._rule = rule
        self.endpoint = None
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        to_reader, to_writer = await asyncio.open_connection(*self._endpoint)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line)
                body = await reader.readexactly(length)
                path = head.split()[1].decode().removeprefix("/v3/")
                what = self._rule(path, json.loads(body))
                if what == "lose request":
                    return
                to_writer.write(head + body)
                answer = await to_reader.readuntil(b"\r\n\r\n")
                if what == "lose answer":
                    await asyncio.sleep(0.05)
                    return
                writer.write(answer)
                lines = [line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length")]
                writer.write(await (to_reader.readexactly(int(lines[0].split(b":")[1])) if lines else to_reader.read()))
                await writer.drain()
        except (EOFError, OSError):
            pass
        finally:
            writer.close()
            to_writer.close()


def loses(*paths, what="lose answer"):
    """A rule that loses the first request or answer of each of these paths."""
    left = list(paths)

    def rule(path, body):
        if path in left:
            left.remove(path)
            return what
        return "pass"

    rule.left = left
    return rule


@pytest.mark.parametrize("what", ["lose answer", "lose request"])
def test_a_write_whose_answer_is_lost_is_made_once(etcd, what):
    async def check():
        rule = loses(what=what)
        async with asyncio.timeout(40), Proxy(etcd.endpoints[0], rule) as proxy:
            store = EtcdStore([proxy.endpoint], f"/test/{uuid.uuid4().hex}/", 3.0)
            watching = Watching(EtcdStore(etcd.endpoints, store._layout._root.decode(), TIMEOUT_S), "")
            rule.left.append("kv/txn")
            one = await store.compare_and_set("a", 0, b"1")
            rule.left.append("kv/txn")
            two = await store.compare_and_set("a", one, b"2")
            rule.left.append("kv/txn")
            assert await store.compare_and_set("a", one, b"lost race") is None
            rule.left.append("kv/txn")
            three = await store.put("a", b"3")
            assert await store.get("a") == (b"3", three)
            await store.put("ab", b"")
            rule.left.append("kv/txn")
            assert await store.delete("a", prefix=True) == 2
            rule.left.append("kv/txn")
            assert await store.delete("a") == 0
            await watching.told(6)
            versions = [change.version for change in watching.changes]
            assert versions[:3] == [one, two, three]
            await asyncio.sleep(0.1)
            assert [(c.key, c.value) for c in watching.changes] == [
                ("a", b"1"), ("a", b"2"), ("a", b"3"), ("ab", b""), ("a", None), ("ab", None),
            ]  # fmt: skip
            assert not rule.left
            await watching.close()
            await store.close()

    asyncio.run(check())


def test_lost_answer_of_a_compare_and_set_that_was_overwritten_since(etcd):
    """Reading the key would not tell: another value stands there, after ours."""

    async def check():
        prefix = f"/test/{uuid.uuid4().hex}/"
        other = EtcdStore(etcd.endpoints, prefix, TIMEOUT_S)
        rule = loses("kv/txn")
        async with asyncio.timeout(40), Proxy(etcd.endpoints[0], rule) as proxy:
            store = EtcdStore([proxy.endpoint], prefix, 3.0)
            mine = asyncio.create_task(store.compare_and_set("a", 0, b"mine"))
            while (entry := await other.get("a")) is None:
                await asyncio.sleep(0.001)
            assert await other.compare_and_set("a", entry.version, b"after it")
            assert await mine == entry.version
            assert (await store.get("a")).value == b"after it"
            await store.close()
            await other.close()

    asyncio.run(check())


def test_a_request_that_comes_late_does_nothing(etcd):
    """A member that hung carries it out long after another has answered it."""

    async def check():
        kept = []

        def rule(path, body):
            if path == "kv/txn" and len(kept) < 2:
                kept.append(body)
                return "lose request"
            return "pass"

        async with asyncio.timeout(40), Proxy(etcd.endpoints[0], rule) as proxy:
            store = EtcdStore([proxy.endpoint, etcd.endpoints[1]], f"/test/{uuid.uuid4().hex}/", TIMEOUT_S)
            await store.put("a", b"old")
            await store.put("a", b"new")
            store._etcd._at = 0
            version = (await store.get("a")).version
            assert await store.compare_and_set("a", 0, b"never") is None
            assert len(kept) == 2
            for body in kept:
                etcd.ask(2, "kv/txn", **body)
            assert await store.get("a") == (b"new", version)
            await store.delete("a")
            for body in kept:
                etcd.ask(2, "kv/txn", **body)
            assert await store.get("a") is None
            await store.close()

    asyncio.run(check())
