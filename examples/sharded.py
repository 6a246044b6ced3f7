"""A small transformer, sharded over all ranks by ``fully_shard``: the job of the demo on several hosts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import regrow

WIDTH, CLASSES, LENGTH = 64, 16, 12


class Model(nn.Module):
    """Reads a sequence and names the class that it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def main() -> None:
    """Train, and write the digest of this rank's part of the final state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    run = regrow.init()
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(1 + run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CLASSES, (2048, LENGTH), generator=generator)
    data = TensorDataset(tokens, tokens.sum(1) % CLASSES)
    run.protect(model=model, optimizer=optimizer, loader=DataLoader(data, batch_size=8, shuffle=True))

    args.out.mkdir(parents=True, exist_ok=True)
    for step in run.steps(args.steps):
        with step:
            x, y = step.batch
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if run.rank == 0 and step.completed:
            (args.out / "step").write_text(str(step.index + 1))
            if (step.index + 1) % 10 == 0:
                print(f"step {step.index + 1:3}  loss {loss.item():.4f}", flush=True)

    digest = regrow.state_digest(model, optimizer, {"rng": torch.get_rng_state()})
    (args.out / f"rank{run.rank}.json").write_text(json.dumps({"digest": digest}))


if __name__ == "__main__":
    main()
