"""Train a small transformer with DistributedDataParallel. The lines that make it survive are marked (*)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import regrow


class Sums(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences of digits; the target at each place is the sum so far, modulo 10."""

    def __init__(self, count: int = 4096, length: int = 24) -> None:
        digits = torch.randint(0, 10, (count, length), generator=torch.Generator().manual_seed(1))
        self.digits, self.sums = digits, digits.cumsum(1) % 10

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sequence and its targets."""
        return self.digits[index], self.sums[index]


class Transformer(nn.Module):
    """Two encoder layers with dropout, and a batch norm on top: state that differs from rank to rank."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.place = nn.Parameter(torch.randn(24, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24), persistent=False)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        """Return the logits at every place."""
        hidden = self.encoder(self.embed(digits) + self.place, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def main() -> None:
    """Train, and write what the state has become."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--wait-free", action="store_true", help="update each bucket while backward goes on")
    parser.add_argument("--out", type=Path, help="write each rank's digest into this directory")
    args = parser.parse_args()

    run = regrow.init()  # (*) instead of dist.init_process_group
    torch.manual_seed(run.rank)
    model = DistributedDataParallel(Transformer(), bucket_cap_mb=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = DataLoader(Sums(), batch_size=16, shuffle=True)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, wait_free=args.wait_free)  # (*)

    for step in run.steps(args.steps):  # (*) yields an interrupted step again
        with step:  # (*) a failure in here is healed, then the step runs again
            digits, sums = step.batch
            loss = nn.functional.cross_entropy(model(digits).flatten(0, 1), sums.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if run.rank == 0 and step.index % 25 == 0:
            print(f"step {step.index:3d}  loss {loss.item():.4f}", flush=True)

    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        digest = regrow.state_digest(model, optimizer, scheduler.state_dict())
        (args.out / f"rank{run.rank}.json").write_text(json.dumps({"rank": run.rank, "digest": digest}))


if __name__ == "__main__":
    main()
