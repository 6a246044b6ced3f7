"""Bring the nodes of a run together: who hosts the store, who is which node, which ranks each has.

Runs once, before any worker exists. Everything that goes wrong here is a ``StartError`` with one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from regrow.agent.options import RunOptions, StartError
from regrow.agent.places import RUN_KEY, Places
from regrow.agent.places import WORLD_KEY as WORLD_KEY
from regrow.agent.store import ControlStore, MemoryStore, StoreLost
from regrow.agent.store_etcd import EtcdStore
from regrow.agent.store_tcp import StoreServer, TcpStore
from regrow.agent.world import World

_RETRY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Site:
    """This agent's place in the run."""

    store: ControlStore
    server: StoreServer | None
    node: int
    nprocs: tuple[int, ...]
    run_id: str
    host_addr: str
    master_addr: str
    master_port: int
    leave: Callable[[], Awaitable[None]] | None = None
    """Lets go of a store that this agent does not host."""

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return sum(self.nprocs)

    @property
    def ranks(self) -> range:
        """The global ranks of this node's workers, in the order of their local ranks."""
        first = sum(self.nprocs[: self.node])
        return range(first, first + self.nprocs[self.node])


async def join(options: RunOptions, on_node_gone: Callable[[int], None]) -> Site:
    """Return once all nodes are here and the first world is written."""
    server: StoreServer | None = None
    store: ControlStore
    host_addr = options.host_addr
    if options.store:
        return await _meet(options, on_node_gone)
    if options.nnodes == 1:
        store, host_addr = MemoryStore(), host_addr or "127.0.0.1"
        if options.master_port is not None:
            _check_port("", options.master_port)
        return await _lead(options, store, None, host_addr)
    assert options.endpoint is not None
    host, port = options.endpoint
    deadline = time.monotonic() + options.join_timeout_s
    if options.node_rank in (0, None):
        memory = MemoryStore()

        def gone(node: int) -> None:
            memory.forget(f"node/{node}")  # before the run has begun its place is free again
            on_node_gone(node)

        server = StoreServer(memory, options.token, gone)
        try:
            await server.start(host, port)
        except OSError as error:
            if options.node_rank == 0:
                raise StartError(f"node 0 cannot listen at {host}:{port}: {_plain(error)}") from None
        else:
            try:
                return await _lead(options, memory, server, host_addr or await _resolve(host))
            except BaseException:
                await server.close()
                raise
    client = await _connect(options, host, port, deadline)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
            return await _follow(options, client, host_addr or client.local_address)
    except TimeoutError:
        await client.close()
        raise StartError(f"the other nodes did not join within {options.join_timeout_s:g} s") from None
    except StoreLost:
        raise StartError(f"node 0 at {host}:{port} went away before all nodes had joined") from None
    except BaseException:
        await client.close()
        raise


async def _meet(options: RunOptions, on_node_gone: Callable[[int], None]) -> Site:
    """Every node alike: the store is etcd's, and no node's."""
    options = options if options.run_id else replace(options, run_id=uuid.uuid4().hex[:12])
    store = EtcdStore(options.store, f"/regrow/{options.run_id}/", options.store_timeout_s)
    places = Places(options, store, options.store_timeout_s, on_node_gone)

    async def leave() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if places.cut_off else options.store_timeout_s):
                await places.leave()
                await store.close()
        store.disconnect()  # if it came to nothing else: leases end by themselves

    await _reached(store, options)
    try:
        port = options.master_port if options.master_port is not None else _free_port()
        host_addr = options.host_addr or store.local_address
        node, run = await places.gather(host_addr, port)
        return _site(store, None, node, host_addr, run, leave)
    except StoreLost as error:
        await leave()
        raise StartError(str(error)) from None
    except BaseException:
        await leave()
        raise


async def _reached(store: EtcdStore, options: RunOptions) -> None:
    """Wait until etcd answers: it may be started together with the job."""
    deadline = time.monotonic() + options.join_timeout_s
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await store.get(RUN_KEY)
            return
        except (StoreLost, TimeoutError) as error:
            if time.monotonic() > deadline:
                store.disconnect()
                why = str(error) or "no answer"
                raise StartError(f"etcd cannot be reached within {options.join_timeout_s:g} s: {why}") from None
        except BaseException:
            store.disconnect()
            raise


async def _lead(options: RunOptions, store: ControlStore, server: StoreServer | None, host_addr: str) -> Site:
    """Node 0: wait for the others, then say what the run looks like."""
    nodes = {0: {"nproc": options.nproc, "nnodes": options.nnodes}}
    await store.put("node/0", json.dumps(nodes[0]).encode())
    try:
        async with asyncio.timeout(options.join_timeout_s), contextlib.aclosing(store.watch("node/")) as changes:  # type: ignore[type-var]
            while len(nodes) < options.nnodes:
                change = await anext(changes)
                node = int(change.key.removeprefix("node/"))
                if change.value is not None:
                    nodes[node] = json.loads(change.value)
                else:
                    nodes.pop(node, None)
    except TimeoutError:
        missing = ", ".join(str(node) for node in range(options.nnodes) if node not in nodes)
        sentence = f"only {len(nodes)} of {options.nnodes} nodes joined within {options.join_timeout_s:g} s"
        await _call_off(store, server, f"{sentence} (missing: node {missing})")
    odd = [node for node, info in nodes.items() if info["nnodes"] != options.nnodes]
    if odd:
        other = nodes[odd[0]]["nnodes"]
        await _call_off(store, server, f"node {odd[0]} was started with --nnodes {other}, node 0 with {options.nnodes}")
    run: dict[str, Any] = {
        "run_id": options.run_id or uuid.uuid4().hex[:12],
        "nprocs": [nodes[node]["nproc"] for node in range(options.nnodes)],
        "master_addr": host_addr,
        "master_port": options.master_port if options.master_port is not None and server is None else _free_port(),
    }
    await store.put(WORLD_KEY, World.first(sum(run["nprocs"]), options.max_restarts, time.time()).dumps())
    await store.put(RUN_KEY, json.dumps(run).encode())
    return _site(store, server, 0, host_addr, run)


async def _call_off(store: ControlStore, server: StoreServer | None, sentence: str) -> None:
    await store.put(RUN_KEY, json.dumps({"error": sentence}).encode())
    if server is not None:
        await server.drain(1.0)
    raise StartError(sentence)


async def _connect(options: RunOptions, host: str, port: int, deadline: float) -> TcpStore:
    while True:
        try:
            left_s = deadline - time.monotonic()
            return await asyncio.wait_for(TcpStore.connect(host, port, options.token), max(left_s, 0.01))
        except PermissionError as error:
            raise StartError(f"node 0 at {host}:{port} refused this node: {error}") from None
        except (OSError, TimeoutError) as error:
            if time.monotonic() + _RETRY_S > deadline:
                waited = f"within {options.join_timeout_s:g} s"
                raise StartError(f"node 0 at {host}:{port} cannot be reached {waited}: {_plain(error)}") from None
            await asyncio.sleep(_RETRY_S)


async def _follow(options: RunOptions, client: TcpStore, host_addr: str) -> Site:
    """Take a place as a node other than 0 and wait until node 0 has seen all."""
    info = json.dumps({"nproc": options.nproc, "nnodes": options.nnodes}).encode()
    places = range(1, options.nnodes) if options.node_rank is None else [options.node_rank]
    for node in places:
        if await client.compare_and_set(f"node/{node}", 0, info) is not None:
            break
    else:
        taken = f"node rank {options.node_rank} is" if options.node_rank is not None else f"all {options.nnodes} are"
        raise StartError(f"this node cannot join: {taken} already taken")
    client.joined(node)
    async with contextlib.aclosing(client.watch(RUN_KEY)) as changes:  # type: ignore[type-var]
        async for change in changes:
            if change.key == RUN_KEY and change.value is not None:
                run = json.loads(change.value)
                if "error" in run:
                    raise StartError(str(run["error"]))
                return _site(client, None, node, host_addr, run, client.close)
    raise StoreLost("the watch ended")


def _site(
    store: ControlStore,
    server: StoreServer | None,
    node: int,
    host_addr: str,
    run: dict[str, Any],
    leave: Callable[[], Awaitable[None]] | None = None,
) -> Site:
    return Site(
        store=store,
        server=server,
        node=node,
        nprocs=tuple(run["nprocs"]),
        run_id=run["run_id"],
        host_addr=host_addr,
        master_addr=run["master_addr"],
        master_port=run["master_port"],
        leave=leave,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(f"port {port} cannot be used: {_plain(error)}") from None


async def _resolve(host: str) -> str:
    infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(infos[0][4][0])


def _plain(error: BaseException) -> str:
    """The operating system's words, without asyncio's wrapping."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
