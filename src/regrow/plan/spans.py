"""Cut the traffic of snapshots into chunks that fit the network's idle spans. Pure: spans in, chunks out.

A profile of some iterations gives the spans in which no collective is under way. Chunks go through a few sub-buffers at
the receiver, so that receiving one overlaps draining another; so none is larger than a sub-buffer. What does not fit
goes after the last span, lengthens the iteration, and is reported: then snapshots are taken less often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Link:
    """What is known of the network, and how much of a span may be used."""

    bytes_s: float
    latency_s: float = 0.0
    buffer_bytes: int = 128 << 20
    """Memory at the receiver through which chunks go."""
    parts: int = 4
    """Into how many sub-buffers it is divided."""
    share: float = 0.8
    """How much of an idle span is used: spans vary."""

    def __post_init__(self) -> None:
        if not (self.bytes_s > 0 and self.latency_s >= 0 and 0 < self.share <= 1 and self.parts >= 1):
            raise ValueError(f"no network has {self}: give a bandwidth above 0 and a share between 0 and 1")

    @property
    def largest(self) -> int:
        """The largest chunk: a sub-buffer."""
        return max(self.buffer_bytes // self.parts, 1)

    def time_s(self, nbytes: float) -> float:
        """Return how long a chunk takes."""
        return self.latency_s + nbytes / self.bytes_s

    def fitting(self, room_s: float) -> int:
        """Return how large a chunk is over in this time."""
        if room_s >= self.time_s(self.largest):
            return self.largest
        return max(math.floor((room_s - self.latency_s) * self.bytes_s), 0)


@dataclass(frozen=True)
class Chunk:
    """A piece of a copy. ``span`` is the idle span it goes in; ``None``: after the last one."""

    copy: int
    nbytes: int
    span: int | None


@dataclass(frozen=True)
class Traffic:
    """All chunks of a snapshot, in order, and how much longer they make the iteration."""

    chunks: tuple[Chunk, ...]
    spill_s: float


def cut(spans_s: Sequence[float], state_bytes: int, copies: int, link: Link) -> Traffic:
    """Cut ``copies`` copies of a state into chunks for the idle spans of an iteration."""
    if copies < 0 or state_bytes < 0:
        raise ValueError(f"{copies} copies of {state_bytes} bytes cannot be sent")
    chunks: list[Chunk] = []
    copy, rest = 0, state_bytes
    if not rest:
        return Traffic((), 0.0)
    for number, span_s in enumerate(spans_s):
        room_s = link.share * span_s
        while copy < copies:
            nbytes = min(link.fitting(room_s), rest)
            if not nbytes:
                break
            chunks.append(Chunk(copy, nbytes, number))
            room_s -= link.time_s(nbytes)
            rest -= nbytes
            if not rest:
                copy, rest = copy + 1, state_bytes
    spill_s = 0.0
    while copy < copies:
        nbytes = min(link.largest, rest)
        chunks.append(Chunk(copy, nbytes, None))
        spill_s += link.time_s(nbytes)
        rest -= nbytes
        if not rest:
            copy, rest = copy + 1, state_bytes
    return Traffic(tuple(chunks), spill_s)


def every(spans_s: Sequence[float], state_bytes: int, copies: int, link: Link, *, most: int = 1000) -> int:
    """Return how many iterations a snapshot's traffic needs to fit their idle spans: take one so often."""
    capacity = sum(_capacity(link.share * span_s, link) for span_s in spans_s)
    if not capacity:
        return most
    k = max(-(-copies * state_bytes // capacity), 1)  # at least: a copy may end in the middle of a span
    while k < most and cut([*spans_s] * k, state_bytes, copies, link).spill_s > 0:
        k += 1
    return min(k, most)


def _capacity(room_s: float, link: Link) -> int:
    """Return how many bytes fit into a span at the most."""
    whole = int(room_s // link.time_s(link.largest))
    return whole * link.largest + link.fitting(room_s - whole * link.time_s(link.largest))


def typical(iterations: Sequence[Sequence[float]], *, least: int = 3) -> tuple[float, ...] | None:
    """Return how long each idle span lasts, from some iterations, the last one last; ``None``: too few are alike.

    Alike are those with as many spans as the last one: others did something else.
    """
    if not iterations:
        return None
    alike = [spans for spans in iterations if len(spans) == len(iterations[-1])]
    if len(alike) < least:
        return None
    return tuple(median(lengths) for lengths in zip(*alike, strict=True))


def share(spans_s: Sequence[float], load_bytes: int, link: Link, *, start_s: float = 0.002) -> float:
    """Return how much of each span to use, from its beginning: what is needed and some more, not all that there is.

    Spans vary, and whatever is still under way when the next collective begins holds that up. ``start_s``: so much of a
    span passes before anything is sent.
    """
    for tenths in range(2, 10):
        usable_s = sum(max(tenths / 10 * span_s - start_s, 0.0) for span_s in spans_s)
        if tenths / 10 >= link.share or usable_s * link.bytes_s >= _RESERVE * load_bytes:
            return min(tenths / 10, link.share)
    return link.share


_RESERVE = 1.2


def remaining_s(span: int, elapsed_s: float, spans_s: Sequence[float] | None, share: float) -> float:
    """Return for how long the network may be used, in an idle span that has begun a while ago.

    Infinite where nothing is known of the span: before there is a profile, or when it has lasted so much longer than it
    used to that the script must be doing something else.
    """
    if spans_s is None or span >= len(spans_s) or elapsed_s > 2 * spans_s[span] + 0.05:
        return math.inf
    return max(share * spans_s[span] - elapsed_s, 0.0)


class Frequency:
    """After how many iterations the next snapshot is to be taken: more at once, fewer only when that seems to last."""

    def __init__(self, *, patience: int = 5) -> None:
        self._patience = patience
        self._below = 0
        self.every = 1

    def propose(self, fitting: int) -> int:
        """Return what to do, given how many iterations a snapshot's traffic fits into by the newest profile."""
        self._below = self._below + 1 if fitting < self.every else 0
        if fitting > self.every or self._below >= self._patience:
            self.every, self._below = fitting, 0
        return self.every
