"""``regrow plan placement``: which hosts keep whose in-memory snapshots, and how likely all survive.

Prints the groups, the exact probabilities beside the paper's bound and a plain ring, and what the memory must hold.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from regrow.plan.placement import (
    Placement,
    TooManyCasesError,
    check_memory,
    domain_survivals,
    memory_needed,
    paper_bound,
    place,
    ring_survival,
    survival,
)
from regrow.sizes import parse_bytes, show_bytes

_WIDTH = 100
_COLUMN = 12


def parse_domains(text: str) -> list[str]:
    """Read the failure domain of each host, in order, like ``a,a,b,b``."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"a failure domain has no name in {text!r}: give one for each host, like a,a,b,b")
    return names


def render(placement: Placement, losses: int) -> str:
    """Return the placement, and what it survives, as a person reads it."""
    hosts, copies = placement.hosts, placement.copies
    others = "by itself" if copies == 1 else f"by itself and {_many(copies - 1, 'other')}"
    racks = f" in {_many(len(set(placement.domains)), 'failure domain')}" if placement.shares_domains else ""
    lines = [f"{_many(hosts, 'host')}{racks}; the snapshots of each are kept {others}"]
    lines += [f"warning: {text}" for text in placement.warnings]
    return "\n".join([*lines, "", *_groups(placement), "", *_chances(placement, losses)])


def _groups(placement: Placement) -> list[str]:
    names = [
        f"{host} ({domain})" if placement.shares_domains else str(host) for host, domain in enumerate(placement.domains)
    ]
    whole = [" ".join(names[host] for host in group) for group in placement.groups if group != placement.ring]
    lines = []
    if whole:
        text = " | ".join(whole)
        if len(text) > _WIDTH and len(whole) > 2:
            shown = 1
            while len(" | ".join([*whole[: shown + 1], "...", whole[-1]])) <= _WIDTH:
                shown += 1
            text = " | ".join([*whole[:shown], "...", whole[-1]])
        each = "each member keeps the snapshots of all" if placement.copies > 1 else "nobody else keeps their snapshots"
        lines += [f"{_many(len(whole), 'group')} of {placement.copies}: {each}", f"  {text}"]
    if placement.ring:
        ring = " > ".join(names[host] for host in (*placement.ring, placement.ring[0]))
        after = "one" if placement.copies == 2 else str(placement.copies - 1)
        lines += [f"a ring of {len(placement.ring)}: each sends to the next {after}", f"  {ring}"]
    return lines


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _chances(placement: Placement, losses: int) -> list[str]:
    hosts, copies = placement.hosts, placement.copies
    if not 1 <= losses <= hosts:
        raise ValueError(f"of {hosts} hosts, {losses} cannot be lost: give a number from 1 to {hosts}")
    heads = ["lost", "hosts", "bound", "ring"]
    rows: list[list[Fraction | None]] = [
        [survival(placement, lost), paper_bound(hosts, copies, lost), ring_survival(hosts, copies, lost)]
        for lost in range(1, losses + 1)
    ]
    notes = ["hosts: so many at random, exact; bound: the paper's; ring: one over all hosts, exact"]
    if hosts % copies:
        notes.append(
            f"({copies} does not divide {hosts}: the bound, for {hosts}/{copies} groups and no ring, may lie above)"
        )
    if placement.shares_domains:
        heads.append("domains")
        notes.append("domains: so many whole failure domains at random, exact")
        whole = len(set(placement.domains))
        by_domain: list[Fraction] = []
        try:
            by_domain = domain_survivals(placement, min(losses, whole))[1:]
        except TooManyCasesError as error:
            notes.append(f"({error})")
        for at, row in enumerate(rows):
            row.append(by_domain[at] if at < len(by_domain) else None)
    table = [f"  {heads[0]:>4}" + "".join(f"{head:>{_COLUMN}}" for head in heads[1:])]
    for lost, row in enumerate(rows, start=1):
        table.append(f"  {lost:>4}" + "".join(f"{_chance(value):>{_COLUMN}}" for value in row))
    return ["the probability that no snapshot is lost with all who keep it", *table, *notes]


def _chance(value: Fraction | None) -> str:
    """Return a probability in which only certainty looks like certainty."""
    if value is None:
        return "-"
    if value in (0, 1):
        return str(value)
    if 1 - value < Fraction(1, 10**6):
        return f"1-{float(1 - value):.1e}"
    return f"{float(value):.6f}" if value > Fraction(1, 10**5) else f"{float(value):.1e}"


def plan_placement(args: Any) -> int:
    """Carry out the command; return the exit code."""
    domains = None if args.domain_of is None else parse_domains(args.domain_of)
    placement = place(args.hosts, args.copies, domains)
    losses = min(args.hosts, max(4, 2 * args.copies)) if args.losses is None else args.losses
    state = None if args.state is None else parse_bytes(args.state)
    memory = None if args.memory is None else parse_bytes(args.memory)
    if memory is not None and state is None:
        raise ValueError("--memory says what is there: give --state, the bytes of a host's workers, to compare it with")
    if state is not None and memory is not None:
        check_memory(state, args.copies, memory)
    print(render(placement, losses))
    if state is not None:
        needed = show_bytes(memory_needed(state, args.copies))
        there = "" if memory is None else f", of {show_bytes(memory)}"
        print(
            f"\nmemory on each host: {needed}{there} (2 buffers x {_many(args.copies, 'host')} x {show_bytes(state)})"
        )
    return 0
