"""Carries out the copies of a plan: all of a phase at once, each from several sources."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from regrow.ids import Rank
from regrow.plan import Copy
from regrow.state import bundles, transfer
from regrow.state.registry import Param, Registry
from regrow.state.small import SmallState

_TAGS_PER_COPY = 1 << 20


class Flow:
    """Sends and receives for this rank."""

    def __init__(self, channel: transfer.Channel, rank: Rank, registry: Registry, small: SmallState) -> None:
        self._channel = channel
        self._rank = rank
        self._registry = registry
        self._small = small
        self._tag = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.receiving_s = 0.0
        """How long this rank received, memory for it included."""

    def run(self, copies: Sequence[Copy]) -> list[Copy]:
        """Do the copies that this rank takes part in; return those that it received."""
        sending: list[Any] = []
        received: list[Copy] = []
        tags = {id(copy): (self._tag + number) * _TAGS_PER_COPY for number, copy in enumerate(copies)}
        self._tag += len(copies)
        for copy in copies:
            if self._rank in copy.sources:
                sending += self._send(copy, tags[id(copy)])
        for copy in copies:
            if copy.rank == self._rank:
                self._receive(copy, tags[id(copy)])
                received.append(copy)
        self.bytes_out += transfer.finish(sending)
        return received

    def _params(self, copy: Copy) -> list[Param]:
        if copy.params is None:
            return self._registry.params
        return [self._registry.params[index] for index in copy.params]

    def _send(self, copy: Copy, tag: int) -> list[Any]:
        params = self._params(copy)
        shared, large = b"", list[torch.Tensor]()
        if copy.small:
            shared, large = self._small.donated()
        elif copy.params is None:
            shared, large = self._small.shared()
        tensors = [tensor for param in params for tensor in bundles.tensors_of(param)] + large
        pending = []
        if copy.sources[0] == self._rank:
            head = {
                "entries": [bundles.describe(param) for param in params],
                "large": [bundles.describe_tensor(tensor) for tensor in large],
                "shared": len(shared),
            }
            pending += transfer.send_bytes(
                self._channel, json.dumps(head).encode() + shared, len(shared), copy.rank, tag
            )
        place = copy.sources.index(self._rank)
        pending += transfer.send_share(
            self._channel, tensors, dst=copy.rank, place=place, sources=len(copy.sources), tag=tag + transfer.HEAD_TAGS
        )
        return pending

    def _receive(self, copy: Copy, tag: int) -> None:
        began = time.monotonic()
        params = self._params(copy)
        text, shared = transfer.receive_bytes(self._channel, copy.sources[0], tag)
        head = json.loads(text)
        incoming = [
            bundles.Incoming(param, entries, staged=copy.staged)
            for param, entries in zip(params, head["entries"], strict=True)
        ]
        large = [bundles.allocate(description, torch.device("cpu")) for description in head["large"]]
        tensors = [tensor for bundle in incoming for tensor in bundle.tensors] + large
        pending = transfer.receive(self._channel, tensors, sources=copy.sources, tag=tag + transfer.HEAD_TAGS)
        self.bytes_in += transfer.finish(pending, tensors)
        self.receiving_s += time.monotonic() - began
        for bundle in incoming:
            bundle.install()
        if copy.small:
            self._small.load_both(shared, large)
        elif copy.params is None:
            self._small.load_shared(shared, large)
