"""The job that ``chaos_hosts`` cuts to pieces: small steps, each written down with the time when it begins and is done.

The time is the machine's monotonic clock, which all of its network namespaces share. Every process writes to a file of
its own, line by line: what it did until it was killed is there. While it lives it says that, too, from a thread: a
process that waits for others, with a rank that somebody else has been given by now, would be one holder too many.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

WIDTH, SAMPLES = 64, 4096
HOLD_EVERY_S = 0.02


class History:
    """Writes down that this process holds its rank, and what it trains."""

    def __init__(self, out: Path, run: regrow.Run) -> None:
        self._run = run
        self._common = {"rank": run.rank, "incarnation": int(os.environ.get("REGROW_INCARNATION", 0))}
        self._common["pid"] = os.getpid()
        self._file = (out / f"history.{os.getpid()}.jsonl").open("ab", buffering=0)
        self._lock = threading.Lock()
        self._step = 0
        threading.Thread(target=self._hold, name="history", daemon=True).start()

    def note(self, what: str, step: int) -> None:
        with self._lock:  # or a generation that was read would be written later than a newer one
            self._step = step
            generation = getattr(self._run, "generation", 0)
            fact = {**self._common, "generation": generation, "step": step, "what": what, "t": time.monotonic()}
            self._file.write((json.dumps(fact) + "\n").encode())

    def _hold(self) -> None:
        while True:
            self.note("held", self._step)
            time.sleep(HOLD_EVERY_S)


def main() -> None:
    """Train, slowly while there is no file ``fast``, and write what the state has become."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    run = regrow.init()
    history, fast = History(args.out, run), False
    torch.manual_seed(run.rank)
    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, 4))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chance = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=chance), torch.randint(0, 4, (SAMPLES,), generator=chance)
    )
    loader = DataLoader(data, batch_size=16, shuffle=True)
    run.protect(model=model, optimizer=optimizer, loader=loader)
    for step in run.steps(args.steps):
        with step:
            history.note("begun", step.index)
            fast = fast or args.pace == 0 or (args.out / "fast").exists()
            if not fast:
                time.sleep(args.pace)
            x, y = step.batch
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed:
            history.note("done", step.index)
    digest = regrow.state_digest(model, optimizer)
    (args.out / f"rank{run.rank}.json").write_text(json.dumps({"rank": run.rank, "digest": digest}))


if __name__ == "__main__":
    main()
