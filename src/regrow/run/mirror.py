"""A rank's own small state, left on its host and on others: random numbers and buffers outlive the host, too.

Replicas hold the parameters of a lost rank, but not what was its own. Whoever completes a step has had this rank's last
contribution to it; so what it leaves must be with the others before each contribution, and is waited for. It is small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regrow.errors import PeerLost
from regrow.ids import Rank, Step
from regrow.plan import Holding
from regrow.run.copies import Copies
from regrow.slots import Left, Slots


class MirroredSlots(Slots):
    """Slots of which other hosts have a copy. Used by the thread that trains; any may ``sever``."""

    def __init__(self, path: Path, copies: Copies) -> None:
        super().__init__(path)
        self._copies = copies
        self._last: dict[str, tuple[Step, bytes]] = {}
        self._from: dict[Rank, int] = {}
        self._refused: set[int] = set()
        """Hosts from which what this rank left could not be had."""

    def start(self, step: Step, payload: bytes) -> None:
        """Keep the state at the start of ``step``, here and elsewhere."""
        super().start(step, payload)
        self._last = {"start": (step, payload)}
        with contextlib.suppress(PeerLost):  # nobody catches it between two steps, and the next generation is given it
            self._copies.put_small("start", step, payload)

    def live(self, step: Step, payload: bytes) -> None:
        """Keep the state within ``step``, here and elsewhere, before a collective is issued."""
        super().live(step, payload)
        self._last["live"] = (step, payload)
        self._copies.put_small("live", step, payload)

    # generations -----------------------------------------------------------------------------------------------------

    def envelope(self) -> dict[str, Any]:
        """Return where this host keeps what others leave, and what that is."""
        return {**self._copies.envelope(), "small": self._copies.kept_small(), "refused": sorted(self._refused)}

    def heard(self, holdings: Sequence[Holding], envelopes: Sequence[dict[str, Any]]) -> list[Holding]:
        """Return the holdings, those of ranks that have lost their host with what other hosts have of them."""
        self._copies.heard(envelopes)
        self._from = {}
        found = []
        for holding in holdings:
            reports = [
                (live if live is not None else max(starts, default=-1), -envelope["node"], starts, live)
                for envelope in envelopes
                for rank, starts, live in envelope["small"]
                if rank == holding.rank and envelope["node"] not in envelopes[holding.rank]["refused"]
            ]
            if holding.fresh and not holding.own_steps and holding.live_step is None and reports:
                _, node, starts, live = max(reports, key=lambda report: report[:2])
                self._from[holding.rank] = -node
                steps = tuple(Step(step) for step in starts)
                found.append(replace(holding, own_steps=steps, live_step=None if live is None else Step(live)))
            else:
                found.append(holding)
        return found

    def fetch(self, rank: Rank) -> Left | None:
        """Return what this rank's predecessor has left on another host; ``None`` if it was on this one."""
        node = self._from.get(rank)
        if node is None:
            return None
        try:
            return self._copies.fetch_small(node)
        except PeerLost:
            self._refused.add(node)
            raise

    def pause(self) -> None:
        """The generation is over: what is left until the next one begins stays here, and is sent then."""
        self._copies.pause()

    def resume(self, generation: int, step: Step) -> None:
        """A generation begins, perhaps with other hosts: they are given what was left last."""
        self._copies.resume(generation, step)
        for kind, (at, payload) in self._last.items():
            self._copies.put_small(kind, at, payload)

    def first(self, generation: int, step: Step, hosts: Sequence[dict[str, Any]]) -> None:
        """The run begins, at this step."""
        self._copies.heard(hosts)
        self.resume(generation, step)

    def sever(self) -> None:
        """Wake whoever waits for another host."""
        self._copies.sever()

    def close(self) -> None:
        """Unmap, and let go of all connections."""
        super().close()
        self._copies.close()
