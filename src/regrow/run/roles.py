"""Who is who in a pipeline: told to everyone once, in the set-up."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from regrow.courier import Address

_ROLE_BYTES = 512


@dataclass(frozen=True)
class Roles:
    """Which rank is which stage, what fails together, and a name for this run that no earlier one had."""

    stages: list[int | None]
    domains: list[str]
    nonce: str
    addresses: list[Address]
    """Where each rank takes messages from others."""
    hosts: list[dict[str, Any]]
    """What each rank says of its host's memory."""

    @classmethod
    def exchange(
        cls, stage: int | None, domain: str, address: Address = ("", 0), host: dict[str, Any] | None = None
    ) -> Roles:
        """Tell everyone. A part of the set-up: a replacement is given what it gave the first time."""
        nonce = secrets.token_hex(8) if dist.get_rank() == 0 else ""
        text = json.dumps([stage, domain, nonce, *address, host or {}]).encode()
        if len(text) > _ROLE_BYTES:
            raise ValueError(f"protect(stage={stage!r}): too long")
        mine = torch.zeros(_ROLE_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        all_ = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_, mine)
        rows = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in all_]
        stages = [row[0] for row in rows]
        if len({value is None for value in stages}) > 1:
            raise ValueError("some ranks gave protect(stage=...) and others did not: give it on all, or on none")
        addresses = [(row[3], row[4]) for row in rows]
        return cls(stages, [row[1] for row in rows], rows[0][2], addresses, [row[5] for row in rows])

    def replicas(self, rank: int) -> list[int]:
        """Return the ranks of the same stage, this one included."""
        return [other for other, stage in enumerate(self.stages) if stage == self.stages[rank]]
