"""Who is which node. A host's place is a key under its lease: it is free again when the host is gone.

The first ``--nnodes`` places are the run's; when all are taken, one of their hosts says what the run looks
like. Whoever comes then, or comes as a standby, holds a place of its own and no rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from regrow.agent.leader import HOSTS, WORLD_KEY
from regrow.agent.options import RunOptions, StartError
from regrow.agent.remains import RUN_KEY, STARTING, begun, wipe
from regrow.agent.store import ControlStore, LeaseLost, StoreLost
from regrow.agent.store_tcp import StoreServer
from regrow.agent.tenure import Tenure
from regrow.agent.world import Node, World
from regrow.door import proof, token_matches

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Site:
    """This agent's place in the run, in one session. ``birth`` is another one for every run, whatever its id."""

    store: ControlStore
    server: StoreServer | None
    tenure: Tenure
    node: int
    session: str
    nprocs: tuple[int, ...]
    run_id: str
    birth: str
    host_addr: str
    master_addr: str
    master_port: int
    leave: Callable[[], Awaitable[None]] | None = None
    """Lets go of a store that this agent does not host."""
    presence: int | None = None
    """The port at which others see that this process is there, if they have no other way to."""

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return sum(self.nprocs)


class CannotReturn(Exception):
    """This node has no place in the run any more, and will not get one."""


async def take(
    options: RunOptions, store: ControlStore, tenure: Tenure, host_addr: str, presence: int | None = None
) -> tuple[int, str]:
    """Take a place; return its number, and the session that holds it. ``StartError`` if there is none."""
    session = uuid.uuid4().hex
    info = _info(options, session, tenure, host_addr, presence)
    until = time.monotonic() + options.dead_after_s + 2 * _POLL_S  # by then a predecessor that is gone is forgotten
    while True:
        for node in await _candidates(options, store, begun=await begun(store)):
            if await store.compare_and_set(f"{HOSTS}{node}", 0, info, tenure.lease) is not None:
                return node, session
        if time.monotonic() > until:
            break
        await asyncio.sleep(_POLL_S)
    if options.node_rank is not None:
        raise StartError(f"this node cannot join: node rank {options.node_rank} is already taken")
    raise StartError(
        f"this node cannot join: all {options.most_nodes} are already taken (with --standby it would wait for a loss)"
    )


async def _candidates(options: RunOptions, store: ControlStore, *, begun: bool) -> Iterable[int]:
    """The numbers to try, in order."""
    if options.node_rank is not None:
        return [options.node_rank]
    if not begun and not options.standby:
        return range(options.most_nodes)
    there = await store.keys(HOSTS)
    if not options.standby and len(there) >= options.most_nodes:
        return []
    entry = await store.get(WORLD_KEY)
    # the number of a lost host is left to it: it may come back
    known = {int(key.removeprefix(HOSTS)) for key in there} | set(World.loads(entry.value).nodes if entry else ())
    first = max({options.nnodes - 1, *known}) + 1
    return range(first, first + 1000)


async def sit(
    options: RunOptions, store: ControlStore, tenure: Tenure, host_addr: str, presence: int | None = None
) -> Site:
    """Take a place in a store that nobody hosts, and wait until the world's hosts are there."""
    entry = await store.get(RUN_KEY)
    if entry is not None:
        _require_token(json.loads(entry.value), options.token)  # before it takes a place from anybody
    node, session = await take(options, store, tenure, host_addr, presence)
    if node < options.nnodes and not await begun(store):
        site = await lead(options, store, None, tenure, node, session, host_addr)
        return replace(site, presence=presence)
    try:
        async with asyncio.timeout(options.join_timeout_s):
            site = await follow(options, store, tenure, node, session, host_addr)
            return replace(site, presence=presence)
    except TimeoutError:
        raise StartError(f"the other nodes did not join within {options.join_timeout_s:g} s") from None


async def retake(options: RunOptions, site: Site, store: ControlStore) -> Site:
    """Take this node's place once more, as a new session. ``CannotReturn`` if it is taken, or the run is gone."""
    entry = await store.get(RUN_KEY)
    if entry is None or json.loads(entry.value).get("birth") != site.birth:
        raise CannotReturn("the run that this node took part in is no longer there")
    key, session = f"{HOSTS}{site.node}", uuid.uuid4().hex
    if site.tenure.lease is not None:
        with contextlib.suppress(StoreLost, LeaseLost):  # or it may lead, without anybody who does, until it expires
            await site.tenure.lease.revoke()
    tenure = await Tenure.begin(store, options.dead_after_s)
    info = _info(options, session, tenure, site.host_addr, site.presence)
    try:
        place = await store.get(key)
        if place is not None and json.loads(place.value)["session"] != site.session:
            raise CannotReturn(f"another host is node {site.node} now")
        version = 0 if place is None else place.version
        if await store.compare_and_set(key, version, info, tenure.lease) is None:
            raise StoreLost("the place was just changing")
    except BaseException:
        await tenure.close()
        raise
    return replace(site, store=store, tenure=tenure, session=session)


def _info(options: RunOptions, session: str, tenure: Tenure, host_addr: str, presence: int | None) -> bytes:
    told: dict[str, Any] = {"session": session, "address": host_addr, "nproc": options.nproc, "slots": options.slots}
    told |= {"presence": presence, "lease": None if tenure.lease is None else tenure.lease.number}
    # where an agent has the store, that is at the port that was given
    told["proof"] = proof(options.token, session)
    told["port"] = options.master_port if options.store or options.alone else None
    return json.dumps({**told, "nnodes": options.nnodes, "standby": options.standby}).encode()


def _knows_token(info: dict[str, Any], token: str) -> bool:
    """Whether what a host says of itself was written with this token: a store that nobody hosts asks for none."""
    return token_matches(info.get("proof"), proof(token, info["session"]))


def _require_token(run: dict[str, Any], token: str) -> None:
    if "birth" in run and not token_matches(run.get("proof"), proof(token, run["birth"])):
        raise StartError("this node cannot join: its token is not this run's")


async def lead(
    options: RunOptions,
    store: ControlStore,
    server: StoreServer | None,
    tenure: Tenure,
    node: int,
    session: str,
    host_addr: str,
) -> Site:
    """As one of the world's hosts: wait for the others, then say what the run looks like, unless another does.

    One that dies of it leaves that to the others.
    """
    while True:
        nodes = await _gather(options, store, server, tenure)
        odd = [other for other, info in nodes.items() if info["nnodes"] != options.nnodes]
        if odd:
            other = nodes[odd[0]]["nnodes"]
            sentence = f"node {odd[0]} was started with --nnodes {other}, node {node} with {options.nnodes}"
            await _call_off(store, server, tenure, sentence)
        strange = [other for other, info in nodes.items() if not _knows_token(info, options.token)]
        if strange:
            sentence = f"node {strange[0]} was started with another token than node {node}"
            await _call_off(store, server, tenure, sentence)
        starting = await store.compare_and_set(RUN_KEY, 0, STARTING, tenure.lease)
        if starting is not None:
            break
        announced = await _announced(store)
        if announced is not None:
            return _site(announced, store, server, tenure, node, session, host_addr)
    await wipe(store, tenure.lease)
    members = [nodes[node] for node in range(options.nnodes)]
    birth = uuid.uuid4().hex
    run: dict[str, Any] = {
        "run_id": options.run_id or uuid.uuid4().hex[:12],
        "birth": birth,
        "proof": proof(options.token, birth),
        "nprocs": [info["nproc"] for info in members],
        "master_addr": members[0]["address"],
        "master_port": members[0]["port"] or free_port(),
    }
    hosts = [Node(info["session"], info["slots"]) for info in members]
    world = World.first(run["nprocs"], options.max_restarts, time.time(), hosts, options.policy)
    # not if there is one: whoever has lost its lease here, and comes late, must not overwrite its successor's
    if await store.compare_and_set(WORLD_KEY, 0, world.dumps()) is None:
        raise LeaseLost(
            "this node stood still while it began the run, and another one has begun it: start this one again"
        )
    if await store.compare_and_set(RUN_KEY, starting, json.dumps(run).encode()) is None:
        raise LeaseLost("the lease is over")
    return _site(run, store, server, tenure, node, session, host_addr)


async def _gather(
    options: RunOptions, store: ControlStore, server: StoreServer | None, tenure: Tenure
) -> dict[int, dict[str, Any]]:
    """Return what the nodes of the run tell of themselves, once all are there."""
    nodes: dict[int, dict[str, Any]] = {}
    try:
        async with asyncio.timeout(options.join_timeout_s), contextlib.aclosing(store.watch(HOSTS)) as changes:  # type: ignore[type-var]
            while len(nodes) < options.nnodes:
                change = await anext(changes)
                node = int(change.key.removeprefix(HOSTS))
                if node >= options.nnodes:
                    continue
                if change.value is not None:
                    nodes[node] = json.loads(change.value)
                else:
                    nodes.pop(node, None)
    except TimeoutError:
        missing = ", ".join(str(node) for node in range(options.nnodes) if node not in nodes)
        sentence = f"only {len(nodes)} of {options.nnodes} nodes joined within {options.join_timeout_s:g} s"
        await _call_off(store, server, tenure, f"{sentence} (missing: node {missing})")
    return nodes


async def _call_off(store: ControlStore, server: StoreServer | None, tenure: Tenure, sentence: str) -> None:
    """Tell those who wait. It hangs on the lease, so that it is not in the way of the next run."""
    await store.compare_and_set(RUN_KEY, 0, json.dumps({"error": sentence}).encode(), tenure.lease)
    if server is not None:
        await server.drain(1.0)
    raise StartError(sentence)


async def follow(
    options: RunOptions, store: ControlStore, tenure: Tenure, node: int, session: str, host_addr: str
) -> Site:
    """As anybody else: wait until the world's hosts are there."""
    waiting = asyncio.create_task(_run(store))
    either: set[asyncio.Future[Any]] = {waiting, tenure.over}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise StartError(f"this node lost its place while it waited for the others: {tenure.over.result()}")
        run = waiting.result()
        _require_token(run, options.token)
    finally:
        waiting.cancel()
    return _site(run, store, None, tenure, node, session, host_addr)


async def _run(store: ControlStore) -> dict[str, Any]:
    while True:
        run = await _announced(store)
        if run is not None:
            return run


async def _announced(store: ControlStore) -> dict[str, Any] | None:
    """Return what the run looks like as soon as somebody says it; None if whoever began to is gone."""
    async with contextlib.aclosing(store.watch(RUN_KEY)) as changes:  # type: ignore[type-var]
        async for change in changes:
            if change.key != RUN_KEY:
                continue
            if change.value is None:
                return None
            run: dict[str, Any] = json.loads(change.value)
            if "error" in run:
                raise StartError(str(run["error"]))
            if "birth" in run:
                return run
    raise StoreLost("the watch ended")


def _site(
    run: dict[str, Any],
    store: ControlStore,
    server: StoreServer | None,
    tenure: Tenure,
    node: int,
    session: str,
    host_addr: str,
) -> Site:
    return Site(
        store=store,
        server=server,
        tenure=tenure,
        node=node,
        session=session,
        nprocs=tuple(run["nprocs"]),
        run_id=run["run_id"],
        birth=run["birth"],
        host_addr=host_addr,
        master_addr=run["master_addr"],
        master_port=run["master_port"],
    )


def free_port() -> int:
    """A port that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
