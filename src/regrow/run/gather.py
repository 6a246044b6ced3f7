"""Tell everyone something small, and hear it from everyone: JSON over the world's own group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any) -> list[Any]:
    """Return what each rank has said, in order. In a set-up, a replacement is given what was said the first time."""
    text = json.dumps(value).encode()
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    longest = int(max(sizes))
    padded = bytearray(text[:longest].ljust(longest, b"\0"))  # whoever only listens to a record may have more to say
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(gathered, torch.frombuffer(padded, dtype=torch.uint8))
    texts = [part[: int(size)].numpy().tobytes() for part, size in zip(gathered, sizes, strict=True)]
    return [json.loads(said) for said in texts]
