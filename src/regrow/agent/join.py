"""Bring the nodes of a run together: who hosts the store, and how the others reach it.

``join`` runs once, before any worker exists: everything that goes wrong there is a ``StartError`` with one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from regrow.agent.interfaces import is_ours, outside
from regrow.agent.leader import HOSTS, LEADER_KEY
from regrow.agent.options import RunOptions, StartError
from regrow.agent.presence import Presence
from regrow.agent.remains import begun, clear, forget_the_last
from regrow.agent.seats import CannotReturn, Site, follow, lead, retake, sit, take
from regrow.agent.store import LeaseLost, MemoryStore, StoreLost
from regrow.agent.store_etcd import EtcdStore
from regrow.agent.store_tcp import StoreServer, TcpStore
from regrow.agent.tenure import Tenure
from regrow.agent.voice import say

_RETRY_S = 0.2


async def join(options: RunOptions, departed: Callable[[str], None]) -> Site:
    """Return once all nodes are here and the first world is written.

    Where this agent hosts the store, ``departed(session)`` is called when the process of another has ended.
    """
    if options.store:
        return await _meet(options)
    if options.alone:
        if options.master_port is not None:
            _check_port("", options.master_port)
        store, host_addr = MemoryStore(), options.host_addr or "127.0.0.1"
        session = await _own(options, store, host_addr)
        return await lead(options, store, None, Tenure.unlimited(), 0, session, host_addr)
    assert options.endpoint is not None
    host, port = options.endpoint
    deadline = time.monotonic() + options.join_timeout_s
    if options.node_rank in (0, None) and not options.standby:
        memory = MemoryStore()

        async def ended(node: int, session: str) -> None:
            """Its workers have ended with it: nobody need wait for its lease."""
            place = await memory.get(f"{HOSTS}{node}")
            if place is not None and json.loads(place.value)["session"] == session:
                departed(session)
                memory.forget(f"{HOSTS}{node}")

        server = StoreServer(memory, options.token, ended, say)
        try:
            host_addr = options.host_addr or await _resolve(host)
            session = await _own(options, memory, host_addr)  # before anybody else can take its place
            await server.start(await _listen_at(options, host), port)
        except OSError as error:
            if options.node_rank == 0:
                raise StartError(f"node 0 cannot listen at {host}:{port}: {_plain(error)}") from None
        else:
            try:
                return await lead(options, memory, server, Tenure.unlimited(), 0, session, host_addr)
            except BaseException:
                await server.close()
                raise
    client = await _connect(options, host, port, deadline)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
            return await _enter(options, client, options.host_addr or client.local_address)
    except TimeoutError:
        await client.close()
        raise StartError(f"the other nodes did not join within {options.join_timeout_s:g} s") from None
    except (StoreLost, LeaseLost):
        raise StartError(f"node 0 at {host}:{port} went away before all nodes had joined") from None
    except BaseException:
        await client.close()
        raise


async def _meet(options: RunOptions) -> Site:
    """Every node alike: the store is etcd's, and no node's."""
    options = options if options.run_id else replace(options, run_id=uuid.uuid4().hex[:12])
    store = EtcdStore(options.store, f"/regrow/{options.run_id}/", options.store_timeout_s)
    tenure: Tenure | None = None
    presence = Presence(options.token, say)

    async def leave() -> None:
        await presence.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.store_timeout_s):
                with contextlib.suppress(StoreLost, LeaseLost):
                    await clear(store, options.dead_after_s)
                await store.close()
        store.disconnect()  # if it came to nothing else: leases end by themselves

    await _reached(store, options)
    try:
        async with asyncio.timeout(options.join_timeout_s):
            await forget_the_last(store, options.dead_after_s)
        host_addr = options.host_addr or store.local_address
        port = None if options.alone else await _seen(presence, host_addr)
        tenure = await Tenure.begin(store, options.dead_after_s)
        return replace(await sit(options, store, tenure, host_addr, port), leave=leave)
    except BaseException as error:
        if tenure is not None:
            await tenure.close()
        await leave()
        if isinstance(error, TimeoutError):
            waited = f"within {options.join_timeout_s:g} s"
            raise StartError(f"an earlier run with --rdzv-id {options.run_id} did not end {waited}") from None
        if isinstance(error, StoreLost | LeaseLost):
            raise StartError(str(error)) from None
        raise


async def _seen(presence: Presence, host_addr: str) -> int:
    try:
        return await presence.start(host_addr)
    except OSError as error:
        raise StartError(f"this node cannot listen at its own address {host_addr}: {_plain(error)}") from None


async def _reached(store: EtcdStore, options: RunOptions) -> None:
    """Wait until etcd answers: it may be started together with the job."""
    deadline = time.monotonic() + options.join_timeout_s
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await begun(store)
            return
        except (StoreLost, TimeoutError) as error:
            if time.monotonic() > deadline:
                store.disconnect()
                why = str(error) or "no answer"
                raise StartError(f"etcd cannot be reached within {options.join_timeout_s:g} s: {why}") from None
        except BaseException:
            store.disconnect()
            raise


async def _own(options: RunOptions, store: MemoryStore, host_addr: str) -> str:
    """As the host of the store: it has the first place and leads, and needs no lease for either."""
    _, session = await take(options, store, Tenure.unlimited(), host_addr)
    await store.put(LEADER_KEY, session.encode())
    return session


async def _enter(options: RunOptions, client: TcpStore, host_addr: str) -> Site:
    tenure = await Tenure.begin(client, options.dead_after_s)
    try:
        node, session = await take(options, client, tenure, host_addr)
        await client.joined(node, session)
        return replace(await follow(options, client, tenure, node, session, host_addr), leave=client.close)
    except BaseException:
        await tenure.close()
        raise


async def rejoin(options: RunOptions, site: Site) -> Site:
    """Come back as a new session, after the last one is over.

    Raises:
        CannotReturn: there is nothing to come back to.
        OSError, TimeoutError, StoreLost, LeaseLost: it did not work this time.
    """
    if not isinstance(site.store, TcpStore):
        return await retake(options, site, site.store)
    try:
        site = await retake(options, site, site.store)
    except StoreLost:
        assert options.endpoint is not None
        try:
            client = await TcpStore.connect(*options.endpoint, options.token)
        except (ConnectionRefusedError, PermissionError) as error:
            raise CannotReturn(_plain(error)) from None  # its host is there, but the process that had the store is not
        try:
            site = await retake(options, site, client)
        except BaseException:
            await client.close()
            raise
    assert isinstance(site.store, TcpStore)
    try:
        await site.store.joined(site.node, site.session)
    except BaseException:
        await site.tenure.close()  # or the next try would find the place taken
        raise
    return replace(site, leave=site.store.close)


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


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(f"port {port} cannot be used: {_plain(error)}") from None


async def _listen_at(options: RunOptions, host: str) -> list[str]:
    """Return the addresses of the store: those of the endpoint, without any that is not on the interface asked for."""
    found = await _all_of(host)
    if options.interface is None or options.host_addr is None:
        return found
    elsewhere = outside(found, options.host_addr)
    wrong = [address for address in elsewhere if is_ours(address)]
    if wrong and len(elsewhere) == len(found):
        raise StartError(
            f"node 0 would listen at {host} ({wrong[0]}), but --interface {options.interface} has {options.host_addr}: "
            "let --rdzv-endpoint name an address of that interface"
        )
    return [address for address in found if address not in wrong]


async def _resolve(host: str) -> str:
    return (await _all_of(host))[0]


async def _all_of(host: str) -> list[str]:
    infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(info[4][0]) for info in infos)]


def _plain(error: BaseException) -> str:
    """The operating system's words, without asyncio's wrapping."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
