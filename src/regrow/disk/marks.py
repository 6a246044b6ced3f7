"""Names and marks of checkpoints: which of them are complete, and whether all their bytes are what was written.

A checkpoint is a directory ``step-N``. When its files are there and it has its name, every rank that wrote to it leaves
a mark with the checksums of its files. It counts when all those ranks' marks of *one* save are there. What died in the
middle has another name (``*.part``) or lacks marks, and is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from regrow.disk.storage import Storage
from regrow.ids import Step

METADATA = ".metadata"
_NAME = re.compile(r"step-(\d+)")
_MARK = re.compile(r"commit\.rank(\d+)\.json")
_VERSION = 1
_BLOCK = 1 << 20


def name_of(step: Step) -> str:
    """Return the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def part_of(step: Step, save: str) -> str:
    """Return the name under which it is written: no other save uses it, whoever still writes to its own."""
    return f"{name_of(step)}.{save}.part"


def mark_of(step: Step, rank: int) -> str:
    """Return the name of a rank's mark."""
    return f"{name_of(step)}/commit.rank{rank}.json"


@dataclass(frozen=True)
class Mark:
    """What one rank says of a checkpoint that is complete for all it knows."""

    step: Step
    rank: int
    world: int
    save: str
    """A name for this one attempt to write it: marks of another attempt do not count."""
    ranks: tuple[int, ...]
    """Who wrote to this storage: all ranks, or those of one host where hosts do not share it."""
    files: dict[str, tuple[int, int]]
    """Size and checksum of each file that this rank wrote, and of the metadata that names them all."""
    t: float

    def dumps(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({"version": _VERSION, **self.__dict__}, indent=1).encode() + b"\n"

    @staticmethod
    def loads(text: bytes) -> Mark:
        """Read what ``dumps`` wrote; ``ValueError`` if it is something else."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if raw.pop("version") != _VERSION:
                raise ValueError("a mark of another version")
            raw["ranks"] = tuple(raw["ranks"])
            raw["files"] = {name: (int(size), int(digest)) for name, (size, digest) in raw["files"].items()}
            return Mark(**{**raw, "step": Step(raw["step"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a mark: {error!r}") from None


@dataclass(frozen=True)
class Found:
    """A checkpoint, as far as its marks tell."""

    step: Step
    marks: tuple[Mark, ...]
    why_not: str = ""
    """Why it does not count; empty if it is complete."""

    @property
    def complete(self) -> bool:
        """Whether every rank has left its mark."""
        return not self.why_not

    @property
    def name(self) -> str:
        """Its directory."""
        return name_of(self.step)

    @property
    def world(self) -> int:
        """How many ranks wrote it, on all storages."""
        return self.marks[0].world if self.marks else 0

    @property
    def files(self) -> dict[str, tuple[int, int]]:
        """All files on this storage, with size and checksum."""
        return {name: facts for mark in self.marks for name, facts in mark.files.items()}

    @property
    def nbytes(self) -> int:
        """Its size."""
        return sum(size for size, _ in self.files.values())

    @property
    def t(self) -> float:
        """When it was complete."""
        return max((mark.t for mark in self.marks), default=0.0)


def find(storage: Storage) -> list[Found]:
    """Return the checkpoints of a storage, oldest first, complete or not."""
    names = [_NAME.fullmatch(name) for name in storage.names()]
    return [look(storage, Step(int(match.group(1)))) for match in names if match is not None]


def look(storage: Storage, step: Step) -> Found:
    """Return what is known of one step's checkpoint without reading its files."""
    marks, strange = [], ""
    for name in storage.names(name_of(step)):
        match = _MARK.fullmatch(name)
        if match is None:
            continue
        try:
            marks.append(Mark.loads(storage.read(f"{name_of(step)}/{name}")))
        except (OSError, ValueError) as error:
            strange = f"{name} is damaged: {error}"
    newest = max(marks, key=lambda mark: mark.t, default=None)
    if newest is None:
        return Found(step, (), strange or "incomplete: no rank has left its mark")
    ours = tuple(sorted((mark for mark in marks if mark.save == newest.save), key=lambda mark: mark.rank))
    missing = sorted({*newest.ranks} - {mark.rank for mark in ours})
    why = f"incomplete: no mark of {_ranks(missing)}" if missing else ""
    return Found(step, ours, strange if missing and strange else why)


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def usable(storage: Storage) -> list[Step]:
    """Return the steps of complete checkpoints, oldest first."""
    return [found.step for found in find(storage) if found.complete]


def damage(storage: Storage, found: Found, files: Iterable[str] | None = None) -> list[str]:
    """Read files, all of them unless some are named, and say what is wrong with each that is not as it was written."""
    wrong = []
    for name in sorted(found.files) if files is None else files:
        size, digest = found.files[name]
        path = f"{found.name}/{name}"
        try:
            with storage.reading(path) as file:
                there, seen = _sum(file)
        except OSError as error:
            wrong.append(f"{path} cannot be read: {error}")
            continue
        if there != size:
            wrong.append(f"{path} is damaged: {there} bytes, {size} were written")
        elif seen != digest:
            wrong.append(f"{path} is damaged: it does not match its checksum")
    return wrong


def _sum(file: Any) -> tuple[int, int]:
    digest, size = xxhash.xxh3_64(), 0
    while block := file.read(_BLOCK):
        digest.update(block)
        size += len(block)
    return size, digest.intdigest()


def outdated(storage: Storage, keep: int, *, damaged: Collection[Step] = (), needed: Step | None = None) -> list[str]:
    """Return the names that nobody needs: older than the last ``keep`` complete ones, or left by somebody who died.

    Those that are known to be ``damaged`` are none of the last. ``needed`` is what the run has begun with, or what all
    have committed last: on another storage there may be nothing else that goes with it.

    What is incomplete and newer than all complete ones may be under way, unless it lies under a passing name: whoever
    asks is the only one who writes, and has nothing under way now.
    """
    names = storage.names()
    found = find(storage)
    complete = [one.step for one in found if one.complete and one.step not in damaged]
    kept = {*complete[-keep:], needed}
    last = complete[-1] if complete else Step(-1)
    gone = [one.name for one in found if one.step not in kept and one.step <= last]
    return gone + [name for name in names if name.endswith((".part", ".gone")) and _NAME.match(name)]
