"""The job that the benchmark of checkpoints on storage measures: the MLP of the data-parallel one, with Adam.

A first run finds out by itself how often it may write a checkpoint. A second one has blocks of steps: without any, with
one every so many steps, and with one that is saved while everyone waits. Those modes are made here, not in the product.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import regrow
from mlp_job import Log, Trainer

WARM_UP = 16
WARM_ONE = 3
"""After this step the first checkpoint is taken: it is the one that allocates memory."""
QUIET = 10**9
"""Steps that no run comes to."""


class Modes:
    """Stands before a run's checkpoints. All ranks change the mode at the same step."""

    def __init__(self, run: regrow.Run) -> None:
        self._disk = run._parts.disk  # type: ignore[attr-defined]

    @property
    def found(self) -> int:
        """What the run has come to by itself."""
        return int(self._disk._governor.every)

    @property
    def why(self) -> str:
        return str(self._disk._governor.explain())

    def switch(self, step: int, every: int | None) -> None:
        """From now on, write one after so many steps; ``None``: none."""
        task = self._disk._task
        if task is not None and not task.over.wait(120):
            raise TimeoutError("a checkpoint was not written within two minutes")
        dist.barrier()  # nobody has one under way that another would have to take part in
        self._disk._governor.fixed = every
        self._disk._due = step + 1 if every is not None else QUIET


@dataclass(frozen=True)
class Block:
    """Some steps with checkpoints of one kind, or with none."""

    name: str
    every: int
    first: int
    steps: int


def blocks(found: int, cycles: int) -> list[Block]:
    """Return blocks in which checkpoints are saved in some way, each between two without any.

    The ways are what the run has found, saving while everyone waits, and other intervals. A block is as short as it can
    be, since the machine's speed drifts: one interval, or several short ones. What the run has found comes between any
    two others, so that there is enough of it to tell a percent of a step from the machine's moods.
    """
    sweep = sorted({max(found // 4, 1), max(found // 2, 1), 2 * found} - {found})
    others = [("sync", found), *((f"every {k}", k) for k in sweep)]
    modes = [mode for other in others for mode in (("chosen", found), other)]
    beside = max(found // 2, 4)
    order = [Block("none", 0, WARM_UP, beside)]
    for cycle in range(cycles):
        first = cycle * 2 % len(modes)  # which comes first changes
        for name, every in modes[first:] + modes[:first]:
            steps = every * max(beside // every, 1)
            order.append(Block(name, every, order[-1].first + order[-1].steps, steps))
            order.append(Block("none", 0, order[-1].first + order[-1].steps, beside))
    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="so many steps the run has to find its interval")
    parser.add_argument("--found", type=int, help="the interval that was found: measure blocks around it")
    parser.add_argument("--cycles", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = regrow.init()
    trainer = Trainer()
    run.protect(model=trainer.model, optimizer=trainer.optimizer)
    log = Log(args.out, run.rank)
    if args.found is None:
        for step in run.steps(args.steps):
            with step:
                trainer.step()
            if step.index == args.steps - 1:
                log.write(found=Modes(run).found, why=Modes(run).why)
        return
    order = blocks(args.found, args.cycles)
    begins = {block.first: block for block in order}
    now = Block("none", 0, 0, WARM_UP)
    for step in run.steps(order[-1].first + order[-1].steps):
        now = begins.get(step.index, now)
        if step.index == WARM_ONE:
            Modes(run).switch(step.index, QUIET)
        elif step.index == now.first:
            Modes(run).switch(step.index, now.every if now.name not in ("none", "sync") else None)
        with step:
            trainer.step()
        if now.name == "sync" and (step.index - now.first) % now.every == 1:
            save(trainer, args.out / "sync" / f"{step.index}")
            for old in args.out.glob("sync/*") if run.rank == 0 else ():  # everyone has come to the end of those
                if old.name != f"{step.index}":
                    shutil.rmtree(old)
        log.write(step=step.index)


def save(trainer: Trainer, directory: Path) -> None:
    """Save as PyTorch does it, while everyone waits."""
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=directory)


if __name__ == "__main__":
    main()
