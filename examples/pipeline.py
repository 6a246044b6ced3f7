"""A small model in four stages, trained by torch's 1F1B schedule with 8 micro-batches: the demo's second job."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import regrow

WIDTH, CLASSES, MICROBATCHES = 64, 8, 8


def part(index: int, count: int) -> nn.Module:
    """Return one stage of the model."""
    out = CLASSES if index == count - 1 else WIDTH
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, out))


def main() -> None:
    """Train, and write the digest of the final state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    run = regrow.init()
    first, last = run.rank == 0, run.rank == run.world_size - 1
    torch.manual_seed(run.rank)
    model = part(run.rank, run.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stage = PipelineStage(model, run.rank, run.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.CrossEntropyLoss())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, WIDTH, generator=generator)
    data = TensorDataset(x, x[:, :CLASSES].argmax(1))
    loader = DataLoader(data, batch_size=128, shuffle=True)
    run.protect(
        model=model,
        optimizer=optimizer,
        loader=loader,
        schedule=schedule,
        stage=run.rank,
        checkpoint_every=20,
        build_stage=lambda index: part(index, run.world_size),
    )

    for step in run.steps(args.steps):
        with step:
            optimizer.zero_grad()
            inputs, target = step.batch if first or last else (None, None)
            losses: list[torch.Tensor] = []
            if first:
                schedule.step(inputs)
            elif last:
                schedule.step(target=target, losses=losses)
            else:
                schedule.step()
            optimizer.step()
        if last and step.completed and (step.index + 1) % 10 == 0:
            print(f"step {step.index + 1:3}  loss {torch.stack(losses).mean():.4f}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    digest = regrow.state_digest(model, optimizer, {"rng": torch.get_rng_state()})
    (args.out / f"rank{run.rank}.json").write_text(json.dumps({"digest": digest}))


if __name__ == "__main__":
    main()
