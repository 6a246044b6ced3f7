"""This rank's snapshots in other hosts' memory: who keeps them, how they get there, and how they are found again.

Each host's agent has a keeper. Which of them keep a host's snapshots follows from the placement, which every rank
computes from the same list of hosts. A keeper that cannot be reached costs a copy, not the training, and is tried again
in the background (``again``).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow import testing
from regrow.errors import PeerLost, Unrecoverable
from regrow.ids import Rank, Step
from regrow.peer.client import Client, Refused
from regrow.peer.keeper import Address, Pace, kept, kept_small
from regrow.peer.memory import Buffer, Damaged, Head, Layout, NoRoom
from regrow.plan.placement import place
from regrow.run.again import Seeker
from regrow.slots import Left

Say = Callable[[str], None]
Event = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the agent told of this host's keeper."""

    node: int
    keeper: Address
    kept: Path
    """Where it keeps other hosts' snapshots; they can be read from here by any process of the host."""
    copies: int
    """How many hosts are to keep each snapshot, this one included."""
    domain: str | None = None
    """What this host fails together with, such as its rack; ``None``: it fails by itself."""


class Copies:
    """Used by the thread that takes snapshots; ``resume`` and ``fetch`` by the one that trains. Any may ``sever``."""

    def __init__(
        self, rank: Rank, host: Host, token: str, *, superseded: Callable[[], bool], say: Say, event: Event
    ) -> None:
        self._rank = rank
        self._host = host
        self._token = token
        self._superseded = superseded
        self._say = say
        self._event = event
        self._addresses: dict[int, Address] = {}
        self._domains: dict[int, str] = {}
        self._warned = ""
        self._clients: dict[int, Client] = {}
        self._seeker: Seeker | None = None
        self._step = Step(0)
        self._generation = 0
        self._severed = False
        self._fetching: Client | None = None
        self.sent_bytes = 0
        self.sending_s = 0.0

    @property
    def count(self) -> int:
        """How many other hosts keep this rank's snapshots now."""
        return len(self._clients)

    @property
    def node(self) -> int:
        """The host that this rank is on."""
        return self._host.node

    def envelope(self) -> dict[str, Any]:
        """Return what others must know of this host."""
        return {"node": self._host.node, "keeper": list(self._host.keeper), "domain": self._host.domain}

    def kept(self) -> list[tuple[int, Head]]:
        """Return whose snapshots lie in this host's memory, and what can be told of them."""
        return [(rank, head) for rank, shelf in kept(self._host.kept).items() for head in shelf.heads()]

    def heard(self, envelopes: Sequence[dict[str, Any]]) -> None:
        """All have said where their hosts keep snapshots: from now on they can be fetched."""
        self._severed = False
        self._addresses = {envelope["node"]: _address(envelope["keeper"]) for envelope in envelopes}
        self._domains = {envelope["node"]: _domain(envelope) for envelope in envelopes}

    def pause(self) -> None:
        """The generation is over: nobody keeps anything until the next one begins."""
        if self._seeker is not None:
            self._seeker.stop()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def resume(self, generation: int, step: Step) -> int:
        """A generation begins: find out who keeps this rank's snapshots now; return how many hosts do."""
        self.pause()
        self._severed = False
        self._generation = generation
        self._step = step
        self._seeker = Seeker(self._client, self._greet)
        self._clients = {node: self._client(node) for node in self._keepers()}
        for node, client in [*self._clients.items()]:
            try:
                self._greet(client)
            except (OSError, Refused, Damaged) as error:
                self._give_up(node, error)
        return len(self._clients) + 1

    def _keepers(self) -> list[int]:
        """Return the other hosts that are to keep this host's snapshots: in other racks, where that can be."""
        nodes = sorted(self._addresses)
        domains = [self._domains[node] for node in nodes]
        placement = place(len(nodes), min(self._host.copies, len(nodes)), domains)
        keepers = [nodes[keeper] for keeper in placement.keepers[nodes.index(self._host.node)][1:]]
        warning = placement.warnings[0] if placement.warnings else ""
        if self._rank == 0 and warning not in ("", self._warned):  # one for all
            self._say(f"snapshots: {warning}")
        self._warned = warning
        self._event("snapshot_keepers", keepers=keepers, domain=self._domains[self._host.node])
        return keepers

    def _client(self, node: int) -> Client:
        return Client(self._addresses[node], self._token, self.look)

    def _greet(self, client: Client) -> None:
        """Let a keeper give up what it has of a future that was given up, before it is sent anything."""
        client.drop_after(self._rank, self._generation, self._step)

    def _regain(self) -> None:
        """Send to those who answer again, from now on."""
        found = {} if self._seeker is None else self._seeker.reached()
        for node, client in found.items():
            self._clients[node] = client
            number = len(self._clients) + 1
            self._say(f"host {node} keeps this rank's snapshots again: {number} of {self._host.copies} hosts do")
            self._event("snapshot_copy_regained", node=node)

    def look(self) -> None:
        """Raise ``PeerLost`` if the generation is over, so that nobody waits any longer for a host."""
        if self._severed or self._superseded():
            raise PeerLost("a new generation began while a snapshot was sent", generation=self._generation)

    def put(self, buffer: Buffer, pace: Pace | None = None) -> None:
        """Return when every keeper that can be reached has the snapshot whole."""
        self._regain()
        if not self._clients:
            return
        began = time.monotonic()
        index, parts = buffer.read(f"the snapshot of rank {self._rank}")
        layout = Layout.of([len(part) for part in parts])
        if testing.awaited("snapshot_send", step := Step(index["step"])):
            pace = _stopping_midway(step)
        for node, client in [*self._clients.items()]:
            try:
                client.put(self._rank, self._generation, buffer, layout, index, pace)
                self.sent_bytes += sum(layout.sizes)
            except (OSError, Refused, Damaged) as error:
                self.look()  # it was woken by the end of the generation
                self._give_up(node, error)
        self.sending_s += time.monotonic() - began

    def put_small(self, kind: str, step: Step, payload: bytes) -> None:
        """Return when every keeper that can be reached has what this rank leaves of its own."""
        if kind == "start":  # what comes within a step is of use together with its start only
            self._regain()
        for node, client in [*self._clients.items()]:
            try:
                client.put_small(self._rank, self._generation, kind, step, payload)
            except (OSError, Refused, Damaged) as error:
                self.look()
                self._give_up(node, error)

    def kept_small(self) -> list[list[Any]]:
        """Return whose own small state lies in this host's memory: rank, steps at whose start, step within which."""
        return [
            [rank, sorted(left.starts), None if left.live is None else left.live[0]]
            for rank, left in kept_small(self._host.kept).items()
        ]

    def fetch_small(self, node: int) -> Left:
        """Return what this rank's predecessor has left on another host."""
        client = self._client(node)
        try:
            return client.get_small(self._rank)
        except (OSError, Refused, Damaged) as error:
            raise PeerLost(f"what rank {self._rank} left cannot be had from host {node}: {error}") from None
        finally:
            client.close()

    def _give_up(self, node: int, error: Exception) -> None:
        client = self._clients.pop(node)
        client.close()
        self._say(
            f"host {node} does not keep this rank's snapshots any more ({error}): until it can be reached again "
            f"{len(self._clients) + 1} of {self._host.copies} hosts do"
        )
        self._event("snapshot_copy_lost", node=node, why=str(error))
        if self._seeker is not None:
            self._seeker.seek(node)

    def fetch(self, step: Step, node: int, into: Buffer) -> None:
        """Bring this rank's snapshot from a host that keeps it to this one; ``Damaged`` if it cannot be had."""
        self._fetching = client = self._client(node)
        try:
            client.get(self._rank, step, into)
        except NoRoom as error:
            raise Unrecoverable(str(error)) from None
        except (OSError, Refused) as error:
            raise Damaged(
                f"the snapshot of rank {self._rank} at step {step} cannot be had from host {node}: {error}"
            ) from None
        finally:
            self._fetching = None
            client.close()

    def sever(self) -> None:
        """Wake whoever sends or fetches."""
        self._severed = True
        if self._seeker is not None:
            self._seeker.stop()
        for client in [*self._clients.values(), *([] if self._fetching is None else [self._fetching])]:
            client.end()

    def close(self) -> None:
        """Let go of all connections."""
        self.pause()


def _stopping_midway(step: Step) -> Pace:
    """Return a pace at which half is sent before a fault strikes that is due there."""
    whole: list[int] = []

    def pace(_: socket.socket, left: int) -> int:
        whole.append(left)
        if len(whole) > 1:
            testing.point("snapshot_send", step)
        return left if len(whole) > 1 else -(-left // 2)

    return pace


def _domain(envelope: dict[str, Any]) -> str:
    name = envelope["domain"]
    return f"host {envelope['node']} alone" if name is None else str(name)


def _address(value: Sequence[Any]) -> Address:
    return str(value[0]), int(value[1])
