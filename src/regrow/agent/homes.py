"""Choose the hosts that ranks live on. Pure, and the same whoever computes it.

A rank whose host lives stays there: moving it would cost its state. Those of a lost host go, in this order, to one
standby that has room for all of them (so that neighbours stay neighbours, and others stay free for the next loss), to
whatever standbys have room, to free slots of hosts that hold ranks already. Within one kind each goes to the host with
the fewest, so that none gets slower than it must. Who finds no room waits for a host to come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from regrow.agent.world import World


def evict(world: World, gone: Iterable[int]) -> World:
    """Return the world without these hosts; whoever lived there has no home any more."""
    gone = set(gone)
    nodes = {node: replace(one, alive=one.alive and node not in gone) for node, one in world.nodes.items()}
    homes = tuple(None if home in gone else home for home in world.homes)
    return replace(world, nodes=nodes, homes=homes)


def settle(world: World, before: World) -> World:
    """Return the world with as many homes as there is room for. ``before`` tells who lived together."""
    together: dict[int, list[int]] = {}
    for rank in world.homeless:
        former = before.homes[rank]
        together.setdefault(-1 if former is None else former, []).append(rank)
    homes, local = list(world.homes), list(world.local)
    room = {node: _free(world, node) for node, one in sorted(world.nodes.items()) if one.alive}
    standbys = [node for node in room if world.nodes[node].standby]
    for ranks in sorted(together.values()):
        whole = [node for node in standbys if len(room[node]) >= len(ranks)]
        kinds = ([min(whole, key=lambda node: len(room[node]))] if whole else [], standbys, list(room))
        for rank in ranks:
            kind = next((nodes for nodes in kinds if any(room[node] for node in nodes)), None)
            if kind is None:
                break
            home = min((node for node in kind if room[node]), key=homes.count)
            homes[rank], local[rank] = home, room[home].pop(0)
    return replace(world, homes=tuple(homes), local=tuple(local))


def _free(world: World, node: int) -> list[int]:
    """The local ranks that nobody has."""
    taken = {world.local[rank] for rank in world.ranks_of(node)}
    return [slot for slot in range(world.nodes[node].slots) if slot not in taken]
