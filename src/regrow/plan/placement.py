"""Choose which hosts keep whose in-memory snapshots, and say how likely all survive when hosts are lost. Pure.

Each host keeps its own workers' snapshots and sends a copy to m - 1 others. What is lost with all its keepers can only
come from storage, for everyone, so few sets of hosts should be fatal: groups of m that keep each other's have one fatal
set for m hosts, a ring over all hosts has one for each. If m does not divide the hosts, the last group takes the
rest and is a ring in itself.

Hosts may share a failure domain (a rack). Then the copies of a host lie in m different ones, and racks are grouped
before their hosts are, so that few sets of *racks* are fatal, too. Every host keeps the snapshots of exactly m hosts,
whatever the racks: memory is what limits m. Under that rule it can be done whenever no rack has more than N // m
hosts, and never otherwise.

Probabilities are exact: sets of lost hosts or racks are counted, not drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from regrow.sizes import show_bytes

_MOST_CASES = 100_000


class TooManyCasesError(ValueError):
    """Racks of many different sizes and many copies: counting would take minutes."""


@dataclass(frozen=True)
class Placement:
    """Who keeps whose snapshots. Hosts are numbers, in the order in which they were given."""

    copies: int
    """Of each host's snapshots, its own included."""
    domains: tuple[str, ...]
    """What each host fails together with."""
    groups: tuple[tuple[int, ...], ...]
    """Each has as many hosts as there are copies; the last may have more, and is a ring."""
    warnings: tuple[str, ...] = ()
    """What the placement could not do, and what is lost with what."""

    @property
    def hosts(self) -> int:
        """How many there are."""
        return len(self.domains)

    @property
    def ring(self) -> tuple[int, ...]:
        """The group that has more hosts than copies: each sends to those after it, the last ones to the first."""
        return self.groups[-1] if len(self.groups[-1]) > self.copies else ()

    @property
    def shares_domains(self) -> bool:
        """Whether any two hosts fail together."""
        return len(set(self.domains)) < self.hosts

    @cached_property
    def keepers(self) -> tuple[tuple[int, ...], ...]:
        """For each host, those that keep its snapshots; itself first."""
        return self._neighbours(1)

    @cached_property
    def keeps(self) -> tuple[tuple[int, ...], ...]:
        """For each host, those whose snapshots it keeps; itself first."""
        return self._neighbours(-1)

    def _neighbours(self, step: int) -> tuple[tuple[int, ...], ...]:
        found: dict[int, tuple[int, ...]] = {}
        for group in self.groups:
            for at, host in enumerate(group):
                found[host] = tuple(group[(at + step * far) % len(group)] for far in range(self.copies))
        return tuple(found[host] for host in range(self.hosts))

    @cached_property
    def fatal_domains(self) -> tuple[frozenset[str], ...]:
        """The smallest sets of domains with which some snapshot is lost, in the order of the groups."""
        order = (host for group in self.groups for host in group)
        sets = dict.fromkeys(frozenset(self.domains[keeper] for keeper in self.keepers[host]) for host in order)
        if min(map(len, sets)) == self.copies:
            return tuple(sets)  # all are equally large: none contains another
        return tuple(one for one in sets if not any(other < one for other in sets))


def place(hosts: int, copies: int, domains: Sequence[str] | None = None) -> Placement:
    """Return who keeps whose snapshots; ``domains`` names what each host fails together with, by default nothing.

    Fewer domains than copies, or one that is too large, are a warning: some copies then fail together, and each domain
    is spread over the groups as evenly as it goes.
    """
    _check_copies(hosts, copies)
    names = tuple(str(host) for host in range(hosts)) if domains is None else tuple(domains)
    if len(names) != hosts:
        raise ValueError(f"there are {hosts} hosts, but {len(names)} failure domains: name one for each host, in order")
    members: dict[str, list[int]] = {}
    for host, name in enumerate(names):
        members.setdefault(name, []).append(host)
    racks = sorted(members.values(), key=lambda rack: -len(rack))  # equal ones stay in order
    groups, racks = _whole_racks(racks, copies)
    groups += _across(racks, copies)
    placement = Placement(copies, names, tuple(map(tuple, groups)))
    return replace(placement, warnings=tuple(_warnings(placement)))


def _check_copies(hosts: int, copies: int) -> None:
    if hosts < 1:
        raise ValueError(f"there must be at least 1 host, got {hosts}")
    if copies < 1:
        raise ValueError(f"there must be at least 1 copy, the host's own, got {copies}")
    if copies > hosts:
        raise ValueError(
            f"{copies} copies need {copies} hosts, but there are {hosts}: take at most {hosts} copies, or more hosts"
        )


def _turns(sizes: Counter[int], copies: int) -> int | None:
    """Return how often a rack may have to come in the ring, for the copies to lie apart; None: they cannot.

    ``sizes`` counts the racks of each size. Hosts of one rack are m apart in a ring that has m hosts for each time that
    it comes again. With enough racks none does; never more often than there are hosts to spare, fewer than m.
    """
    groups, rest = divmod(sum(size * count for size, count in sizes.items()), copies)
    if max(sizes, default=0) > groups:
        return None
    if not rest:
        return 0
    room = (sum(min(size, turns) * count for size, count in sizes.items()) for turns in range(1, rest + 1))
    return next(turns for turns, hosts in enumerate(room, start=1) if hosts >= turns * copies + rest)


def _whole_racks(racks: list[list[int]], copies: int) -> tuple[list[list[int]], list[list[int]]]:
    """Group m racks of equal size as long as the others can still be grouped as well as before; return those, too."""
    sizes = Counter(map(len, racks))
    turns = _turns(sizes, copies)
    groups: list[list[int]] = []
    at = 0
    while turns is not None and at + copies <= len(racks):
        block = racks[at : at + copies]
        others = sizes - Counter({len(block[0]): copies})
        if len(block[0]) == len(block[-1]) and _turns(others, copies) == turns:
            groups += [list(group) for group in zip(*block, strict=True)]
            sizes = others
            del racks[at : at + copies]
        else:
            at += 1
    return groups, racks


def _across(racks: list[list[int]], copies: int) -> list[list[int]]:
    """Group the hosts of unequal racks, the largest of which comes first."""
    groups, rest = divmod(sum(map(len, racks)), copies)
    if not groups:
        return []
    ring: list[list[int]] = []
    if rest:
        turns = _turns(Counter(map(len, racks)), copies)
        inner = groups - (turns or 1)
        least = [0 if turns is None else max(0, len(rack) - inner) for rack in racks]
        most = [len(rack) if turns is None else min(len(rack), turns) for rack in racks]
        taken = _fill(least, most, (turns or 1) * copies + rest)
        ring = [_dealt([rack[len(rack) - n :] for rack, n in zip(racks, taken, strict=True)], max(taken))]
        racks = [rack[: len(rack) - n] for rack, n in zip(racks, taken, strict=True)]
        groups = inner
    row = _dealt(racks, groups)
    return [row[start : start + copies] for start in range(0, len(row), copies)] + ring


def _fill(least: list[int], most: list[int], total: int) -> list[int]:
    taken = list(least)
    while sum(taken) < total:
        for at, limit in enumerate(most):
            if taken[at] < limit and sum(taken) < total:
                taken[at] += 1
    return taken


def _dealt(racks: list[list[int]], rows: int) -> list[int]:
    """Deal the hosts out to rows like cards, rack by rack: no row has two of a rack of up to so many. All rows, joined.

    The largest go first: a rack that fills a column comes again after a full row, and a smaller one that is split
    between two columns leaves out a row at least.
    """
    cards = [host for rack in sorted(racks, key=lambda rack: -len(rack)) for host in rack]
    return [host for row in range(rows) for host in cards[row::rows]]


def _warnings(placement: Placement) -> Iterable[str]:
    fatal = min(placement.fatal_domains, key=len)
    copies, hosts = placement.copies, placement.hosts
    if len(fatal) == copies:
        return
    counts = Counter(placement.domains)
    name, count = counts.most_common(1)[0]
    fewer = _copies(hosts // count)
    if len(counts) < copies:
        yield (
            f"{copies} copies need {copies} failure domains to lie apart, but there are {len(counts)}: "
            f"spread the hosts over more, or keep {fewer}"
        )
    else:
        yield (
            f"failure domain {name} has {count} of the {hosts} hosts: for {copies} copies to lie apart, with as many "
            f"on each host, one may have at most {hosts // copies}; move hosts to others, or keep {fewer}"
        )
    lost = sum({placement.domains[keeper] for keeper in keepers} <= fatal for keepers in placement.keepers)
    close = sum(len({placement.domains[keeper] for keeper in keepers}) < copies for keepers in placement.keepers)
    yield (
        f"{close} of {hosts} hosts have copies that fail together; the loss of {' and '.join(sorted(fatal))} is enough "
        f"to lose the snapshots of {lost}"
    )


def _copies(count: int) -> str:
    return "1 copy" if count == 1 else f"{count} copies"


def survival(placement: Placement, lost: int) -> Fraction:
    """Return the probability that every host's snapshots survive the loss of so many hosts, all equally likely."""
    _check_lost(lost, placement.hosts, "hosts")
    size, copies = len(placement.ring), placement.copies
    groups = len(placement.groups) - (size > 0)
    count = sum(
        _ring_sets(size, copies, inside) * _group_sets(groups, copies, lost - inside)
        for inside in range(min(size, lost) + 1)
    )
    return Fraction(count, math.comb(placement.hosts, lost))


def ring_survival(hosts: int, copies: int, lost: int) -> Fraction:
    """Return the same for one ring over all hosts, each sending to its next neighbours: to compare with."""
    _check_copies(hosts, copies)
    _check_lost(lost, hosts, "hosts")
    return Fraction(_ring_sets(hosts, copies, lost), math.comb(hosts, lost))


def paper_bound(hosts: int, copies: int, lost: int) -> Fraction:
    """Return GEMINI's bound: where m divides N, not above the exact value, and equal to it for fewer than 2m losses.

    It counts N / m fatal sets. Where m does not divide N there are more, in the ring, and the bound may lie above.
    """
    _check_copies(hosts, copies)
    _check_lost(lost, hosts, "hosts")
    if lost < copies:
        return Fraction(1)
    fatal = Fraction(hosts * math.comb(hosts - copies, lost - copies), copies * math.comb(hosts, lost))
    return max(Fraction(0), 1 - fatal)


def domain_survivals(placement: Placement, most: int) -> list[Fraction]:
    """Return the probability that every host's snapshots survive the loss of 0, 1, ... ``most`` whole domains.

    Groups are not independent here, since racks have hosts in several. One fatal set is looked at after the other, and
    for each choice of lost domains among those that a later one names again, the sets so far are counted by size. The
    groups are in an order in which there are few such domains at any time: fewer than 4m, and with whole racks
    grouped far fewer. All sizes are counted in one large integer.
    """
    names = list(dict.fromkeys(placement.domains))
    _check_lost(most, len(names), "failure domains")
    bit = {name: 1 << at for at, name in enumerate(names)}
    width = len(names) + 1  # no count is larger than the number of all sets
    all_sizes = (1 << width * (most + 1)) - 1
    last = {name: at for at, fatal in enumerate(placement.fatal_domains) for name in fatal}
    seen: set[str] = set()
    counts = {0: 1}
    for at, fatal in enumerate(placement.fatal_domains):
        for name in sorted(fatal - seen):
            lost = {chosen | bit[name]: (count << width) & all_sizes for chosen, count in counts.items()}
            counts |= {chosen: count for chosen, count in lost.items() if count}
        seen |= fatal
        whole = sum(bit[name] for name in fatal)
        done = sum(bit[name] for name in fatal if last[name] == at)
        merged: dict[int, int] = {}
        for chosen, count in counts.items():
            if chosen & whole != whole:
                merged[chosen & ~done] = merged.get(chosen & ~done, 0) + count
        counts = merged
        if len(counts) > _MOST_CASES:
            raise TooManyCasesError(
                f"too many cases to count for {placement.copies} copies in {len(names)} failure domains of different "
                "sizes: make them equal, or keep at most 4 copies"
            )
    total = sum(counts.values())
    for _ in set(names) - seen:  # named by no smallest fatal set: lost or not, it is all the same
        total = (total + (total << width)) & all_sizes
    one = (1 << width) - 1
    return [Fraction(total >> width * lost & one, math.comb(len(names), lost)) for lost in range(most + 1)]


def _check_lost(lost: int, there: int, what: str) -> None:
    if not 0 <= lost <= there:
        raise ValueError(f"of {there} {what}, {lost} cannot be lost: give a number from 0 to {there}")


def _group_sets(groups: int, copies: int, lost: int) -> int:
    """Count the sets of so many lost hosts that contain no whole group."""
    return sum(
        (-1) ** whole * math.comb(groups, whole) * math.comb((groups - whole) * copies, lost - whole * copies)
        for whole in range(min(groups, lost // copies) + 1)
    )


def _ring_sets(size: int, copies: int, lost: int) -> int:
    """Count the sets of so many lost hosts in a ring that contain no m in a row.

    After each living host come 0 to m - 1 lost ones. Such sequences, laid into the ring from each of its places on,
    give each set once for every living host.
    """
    alive = size - lost
    if not alive:
        return int(not size)
    sequences = sum(
        (-1) ** long * math.comb(alive, long) * math.comb(lost - long * copies + alive - 1, alive - 1)
        for long in range(min(alive, lost // copies) + 1)
    )
    return sequences * size // alive


def memory_needed(state_bytes_per_host: float, copies: int) -> float:
    """Return what each host needs: for every host that it keeps, one snapshot that is whole and one that arrives."""
    if not (math.isfinite(state_bytes_per_host) and state_bytes_per_host >= 0):
        raise ValueError(f"the state of a host must be a number of bytes from 0 on, got {state_bytes_per_host}")
    if copies < 1:
        raise ValueError(f"there must be at least 1 copy, the host's own, got {copies}")
    return 2 * copies * state_bytes_per_host


def check_memory(state_bytes_per_host: float, copies: int, available_bytes: float, limit: str = "") -> None:
    """Refuse copies that do not fit the memory of a host; ``limit`` says what leaves no more."""
    needed = memory_needed(state_bytes_per_host, copies)
    if not available_bytes >= 0:
        raise ValueError(f"the memory of a host must be a number of bytes from 0 on, got {available_bytes}")
    if needed <= available_bytes:
        return
    fitting = math.floor(available_bytes / (2 * state_bytes_per_host))
    remedy = f"keep at most {_copies(fitting)}, or" if fitting else "not even the host's own fits; keep"
    there = f"{show_bytes(available_bytes)} is there{f' ({limit})' if limit else ''}"
    raise ValueError(
        f"{_copies(copies)} of {show_bytes(state_bytes_per_host)}, each in two buffers, need "
        f"{show_bytes(needed)} on each host, but {there}: {remedy} a state of at "
        f"most {show_bytes(available_bytes / (2 * copies))} per host"
    )
