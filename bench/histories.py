"""Judge what the processes of a run have written down: whether any rank was ever held by two. Pure."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """One process holds a rank, or has begun or done a step, at a time on a clock that all share."""

    t: float
    rank: int
    incarnation: int
    generation: int
    pid: int
    step: int
    what: str


def read(directory: Path) -> list[Fact]:
    """Return all that was written down, by time. A last line that was torn by a kill is left out."""
    facts = []
    for path in directory.glob("history.*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                facts.append(Fact(**json.loads(line)))
    return sorted(facts)


def faults(facts: Iterable[Fact]) -> list[str]:
    """Return in words whatever could not be if every rank had one holder at a time; nothing if all is well."""
    by_rank: dict[int, list[Fact]] = defaultdict(list)
    for fact in sorted(facts):
        by_rank[fact.rank].append(fact)
    found = []
    for rank, own in sorted(by_rank.items()):
        found += [f"rank {rank}: {fault}" for fault in (*_overlaps(own), *_falls(own), *_doubles(own))]
    return found


def _overlaps(facts: list[Fact]) -> Iterable[str]:
    """Every holder's time, from the first to the last that it did, lies apart from all others'."""
    spans: dict[tuple[int, int], list[Fact]] = defaultdict(list)
    for fact in facts:
        spans[fact.incarnation, fact.pid].append(fact)
    newest: Fact | None = None
    for span in spans.values():  # in the order of their first facts
        if newest is not None and span[0].t <= newest.t:
            yield (
                f"process {span[0].pid} (incarnation {span[0].incarnation}) held it from {span[0].t:.3f} s on, "
                f"process {newest.pid} (incarnation {newest.incarnation}) until {newest.t:.3f} s"
            )
        newest = span[-1] if newest is None else max(newest, span[-1])


def _falls(facts: list[Fact]) -> Iterable[str]:
    """Generations and incarnations only rise."""
    for before, fact in itertools.pairwise(facts):
        for name in ("generation", "incarnation"):
            old, new = getattr(before, name), getattr(fact, name)
            if new < old:
                yield f"{name} {new} (process {fact.pid}, {fact.t:.3f} s) came after {name} {old}"


def _doubles(facts: list[Fact]) -> Iterable[str]:
    """A generation has one holder, and an incarnation is one process."""
    for name in ("generation", "incarnation"):
        holders: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for fact in facts:
            holders[getattr(fact, name)].add((fact.incarnation, fact.pid))
        for number, them in sorted(holders.items()):
            if len(them) > 1:
                who = ", ".join(f"process {pid} (incarnation {incarnation})" for incarnation, pid in sorted(them))
                yield f"{name} {number} had {len(them)} holders: {who}"


def told_twice(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return the generations and epochs of leaders that more than one agent says to have begun."""
    found = []
    for event, name in (("generation", "generation"), ("leader", "epoch")):
        seen: dict[int, int] = {}
        for each in events:
            if each["event"] == event:
                number = each[name]
                if number in seen:
                    found.append(f"{name} {number} was begun by node {seen[number]} and by node {each['node']}")
                seen[number] = each["node"]
    return found
