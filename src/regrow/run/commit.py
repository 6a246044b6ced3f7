"""Make one checkpoint of what all ranks have written: told over a courier, in the background, nobody waits for it.

Every rank tells the leader of each storage what is in its file, or that it could not write one. A leader puts the
metadata together, gives the directory its name, and tells its ranks; then each leaves its mark. Where hosts share the
storage there is one leader. A rank that fails says so instead of saying nothing, so all come to the same end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import xxhash

from regrow import testing
from regrow.courier import Courier
from regrow.disk import dcp, marks
from regrow.disk.storage import Storage
from regrow.ids import Rank, Step

_WITHIN = timedelta(days=7)
"""Others may be slow; whether they make progress is the agents' to see, and the end of the generation ends the wait."""


@dataclass(frozen=True)
class Written:
    """What a rank has put on storage: its file, and what is where in it."""

    file: str
    rows: list[dcp.Row]
    facts: tuple[int, int]


@dataclass(frozen=True)
class Refused:
    """Why there is no checkpoint of this step."""

    why: str


class Committer:
    """One rank's part in it. Knows what was told before: rows that have not changed are not told again."""

    def __init__(
        self, rank: Rank, storages: Sequence[tuple[int, ...]], storage: Storage, courier: Courier, keep: int
    ) -> None:
        """``storages``: which ranks share one, for each storage; the first of them leads."""
        self._rank = rank
        self._storages = storages
        self._together = next(ranks for ranks in storages if rank in ranks)
        self._storage = storage
        self._courier = courier
        self._keep = keep
        self._told: dict[int, str] = {}
        self._heard: dict[int, tuple[str, list[dcp.Row]]] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank puts the metadata together, on its storage."""
        return self._rank == self._together[0]

    def forget(self) -> None:
        """A generation begins: others may know nothing of what was told before."""
        self._told.clear()
        self._heard.clear()

    def commit(
        self, step: Step, save: str, part: Written | Refused, generation: int, go_on: Callable[[], None]
    ) -> marks.Found | Refused:
        """Return the checkpoint, or why there is none; ``PeerLost`` if the generation is over before.

        ``go_on`` raises that, too. It is asked before anything is done to storage: whoever was held up there may come
        back when the next generation has made the same checkpoint.
        """
        name = f"disk/{save}/{step}"
        for ranks in self._storages:
            self._tell(generation, ranks[0], f"{name}/part", self._message(ranks[0], part))
        if self.leads:
            answer = self._lead(step, save, name, generation, go_on)
            for rank in self._together:
                self._tell(generation, rank, f"{name}/whole", answer)
        told = self._take(generation, self._together[0], f"{name}/whole")
        go_on()
        if told["refused"] is not None:
            return Refused(told["refused"])
        assert isinstance(part, Written)
        testing.point("disk_mark", step)
        files = {part.file: part.facts, marks.METADATA: (int(told["metadata"][0]), int(told["metadata"][1]))}
        world = sum(len(ranks) for ranks in self._storages)
        mark = marks.Mark(step, self._rank, world, save, self._together, files, time.time())
        try:
            self._storage.write(marks.mark_of(step, self._rank), mark.dumps())
        except OSError as error:
            return Refused(f"rank {self._rank} could not leave its mark: {error}")
        return marks.Found(step, (mark,))

    def _message(self, leader: int, part: Written | Refused) -> dict[str, Any]:
        if isinstance(part, Refused):
            return {"refused": f"rank {self._rank}: {part.why}"}
        digest = dcp.digest_of(part.rows)
        known = self._told.get(leader) == digest
        self._told[leader] = digest
        return {"refused": None, "file": part.file, "digest": digest, "rows": None if known else part.rows}

    def _lead(self, step: Step, save: str, name: str, generation: int, go_on: Callable[[], None]) -> dict[str, Any]:
        """Hear from all, and make it a checkpoint."""
        files, refused = [], []
        others = sorted(rank for ranks in self._storages for rank in ranks if rank not in self._together)
        for rank in (*self._together, *others):  # what is on this storage is read from here
            told = self._take(generation, rank, f"{name}/part")
            if told["refused"] is not None:
                refused.append(told["refused"])
                continue
            if told["rows"] is not None:
                self._heard[rank] = told["digest"], told["rows"]
            digest, rows = self._heard[rank]
            assert digest == told["digest"]
            files.append((told["file"], rows))
        if not refused:
            try:
                return {"refused": None, "metadata": self._publish(step, save, dcp.metadata(files, save), go_on)}
            except (OSError, dcp.Incomplete) as error:
                refused.append(f"rank {self._rank}: {error}")
        go_on()
        self._storage.remove(self.directory(step, save))
        return {"refused": "; ".join(refused[:3])}

    def _publish(self, step: Step, save: str, metadata: bytes, go_on: Callable[[], None]) -> tuple[int, int]:
        directory, final = self.directory(step, save), marks.name_of(step)
        go_on()
        self._storage.write(f"{directory}/{marks.METADATA}", metadata)
        testing.point("disk_rename", step)
        if directory != final:
            there = final in self._storage.names()
            go_on()
            if there:
                self._storage.remove(final)  # of an earlier try, or of a future that was given up
            self._storage.rename(directory, final)
        return len(metadata), xxhash.xxh3_64_intdigest(metadata)

    def directory(self, step: Step, save: str) -> str:
        """Return where a checkpoint is written to before it has its name."""
        return marks.part_of(step, save) if self._storage.renames else marks.name_of(step)

    def tidy(self, damaged: Collection[Step], needed: Step | None) -> None:
        """Remove what nobody needs any more. When nothing is under way. ``OSError`` if storage does not answer."""
        if self.leads:
            for name in marks.outdated(self._storage, self._keep, damaged=damaged, needed=needed):
                self._storage.remove(name)

    def _tell(self, generation: int, rank: int, name: str, message: dict[str, Any]) -> None:
        text = memoryview(json.dumps(message).encode())
        self._courier.send(rank, name, text, stays=True, generation=generation)

    def _take(self, generation: int, rank: int, name: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(bytes(self._courier.take(rank, name, _WITHIN, generation=generation)))
        return told
