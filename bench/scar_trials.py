"""Trials of SCAR's experiments: an algorithm fails at a random iteration, recovers in several ways, and goes on.

A trial draws the iteration of the failure and the blocks that are lost; every method of recovery meets the very same
failure. The checkpoints of all methods watch one undisturbed run. At a failure the process is forked for each of them:
blocks are lost and recovered in the copy, and the copy goes on until it has converged.
"""

from __future__ import annotations

import importlib
import os
import pickle
import traceback
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regrow.iterative import Blocks, RunningCheckpoint
from regrow.plan.perturbation import Fit, cost_bound, fit
from scar_models import Algorithm, Floats, generator

if TYPE_CHECKING:
    from numpy.random import Generator

LOST = {"1/4": 0.25, "1/2": 0.5, "3/4": 0.75}


class Method(NamedTuple):
    """A way to save and to recover."""

    fraction: float
    priority: str
    full: bool = False


METHODS = {
    "full": Method(1.0, "round_robin", full=True),
    "partial": Method(1.0, "round_robin"),
    "partial_priority": Method(1 / 8, "distance"),
    "round_robin": Method(1 / 8, "round_robin"),
    "random": Method(1 / 8, "random"),
}


@dataclass(frozen=True)
class Model:
    """An algorithm with what its trials need."""

    title: str
    where: str
    """Module and class."""
    target: float
    """The loss at which it has converged."""
    every: int
    """C: full checkpoints are so many iterations apart, and running ones save as much in the same time."""
    settle: int = 3
    """The fixed point is where the undisturbed run is after so many times as long."""
    trials: float = 1.0
    """So many times as many as asked for: more where chance decides much and time allows; fewer for the bound alone."""

    def make(self, seed: int) -> Algorithm:
        module, name = self.where.split(":")
        return getattr(importlib.import_module(module), name)(seed)


@dataclass(frozen=True)
class Outcome:
    """One recovery. Costs are in iterations, relative to the undisturbed run."""

    cost: int
    arrived: bool
    """False: it was given up, and has cost at least this."""
    bound: float | None = None
    """The theorem's bound on ``distance_cost``; ``None``: its assumption does not hold, or it was not looked at."""
    distance_cost: int | None = None
    """The same with the distance to the fixed point in place of the loss: that is what the bound is on."""


@dataclass
class Run:
    """An undisturbed run, and what became of its failures."""

    seed: int
    losses: list[float]
    blocks: int
    contraction: Fit
    failures: list[int] = field(default_factory=list)
    outcomes: dict[str, dict[str, list[Outcome]]] = field(default_factory=dict)
    """By the fraction lost, by method, one for each failure."""

    @property
    def length(self) -> int:
        """After how many iterations the undisturbed run has converged."""
        return len(self.losses) - 1


class _Goal(NamedTuple):
    target: float
    length: int
    limit: int
    fixed: Floats | None
    """Where the algorithm is drawn to; ``None``: the theorem's assumption does not hold."""
    distances: Floats


def state(blocks: Blocks) -> Floats:
    """Return the parameters of all blocks as one vector."""
    return np.concatenate([np.asarray(blocks.get(name)[0], dtype=np.float64).ravel() for name in blocks.names()])


def run(model: Model, seed: int, trials: int, *, longest: int = 3000) -> Run:
    """Run the algorithm undisturbed, and then with so many failures, each one alone."""
    algorithm = model.make(seed)
    losses, states = [algorithm.loss()], [state(algorithm.blocks)]
    while losses[-1] > model.target:
        if len(losses) > longest:
            raise RuntimeError(f"{model.title} has not come to {model.target} in {longest} iterations")
        algorithm.iterate(len(losses))
        losses.append(algorithm.loss())
        states.append(state(algorithm.blocks))
    length = len(losses) - 1
    if length < 2:
        raise ValueError(f"{model.title} comes to {model.target} in {length} iterations: there is none to fail in")
    for iteration in range(length + 1, model.settle * length + 1):
        algorithm.iterate(iteration)
    fixed = state(algorithm.blocks)
    distances = np.array([np.linalg.norm(each - fixed) for each in states])
    contraction = fit(distances.tolist())
    if reason := _not_drawn(algorithm, fixed, float(distances[-1]), contraction, model.settle * length, length):
        contraction = replace(contraction, holds=False, reason=reason)
    goal = _Goal(model.target, length, 3 * length, fixed if contraction.holds else None, distances)
    result = Run(seed, losses, len(algorithm.blocks.names()), contraction)
    _fail(model, goal, result, trials)
    return result


def _not_drawn(
    algorithm: Algorithm, fixed: Floats, distance: float, contraction: Fit, iterated: int, length: int
) -> str:
    """Return why the algorithm is not drawn to the point where it is; nothing if it is.

    The theorem is on *every* state, and the run has shown a few: so look at some beside the point. Where the fixed
    points are a whole surface (factors can be turned), a disturbed run comes to rest on another one.
    """
    algorithm.iterate(iterated + 1)
    if float(np.linalg.norm(state(algorithm.blocks) - fixed)) > 1e-3 * distance:
        return "where the run should rest it moves on: there is no fixed point, or it is farther away"
    if contraction.c is None:
        return ""
    random = generator(iterated)
    for name in algorithm.blocks.names():
        there = algorithm.blocks.get(name)[0]
        there += random.normal(0, 0.1 * distance / np.sqrt(fixed.size), there.shape)
    away = []
    for iteration in range(iterated + 2, iterated + length + 2):
        away.append(float(np.linalg.norm(state(algorithm.blocks) - fixed)))
        algorithm.iterate(iteration)
    if away[-1] > away[-2] * (1 - (1 - contraction.c) / 10):
        return "pushed aside from where it rests it does not come back: there are fixed points beside it"
    return ""


def _fail(model: Model, goal: _Goal, result: Run, trials: int) -> None:
    random = generator(result.seed, 1 << 20)
    result.failures = sorted(_geometric(random, goal.length) for _ in range(trials))
    result.outcomes = {lost: {method: [] for method in METHODS} for lost in LOST}
    algorithm = model.make(result.seed)
    checkpoints = {
        name: RunningCheckpoint(
            algorithm.blocks, every=model.every, fraction=method.fraction, priority=method.priority, seed=result.seed
        )
        for name, method in METHODS.items()
        if not method.full
    }
    checkpoints["full"] = checkpoints["partial"]
    watching = [checkpoint for name, checkpoint in checkpoints.items() if name != "full"]
    now = 0
    for failure in result.failures:
        while now < failure:
            now += 1
            algorithm.iterate(now)
            for checkpoint in watching:
                checkpoint.step(now)
        names = list(algorithm.blocks.names())
        everything = _recover(algorithm, checkpoints["full"], names, now, goal, full=True)
        for lost, share in LOST.items():
            chosen = random.choice(len(names), round(share * len(names)), replace=False)
            result.outcomes[lost]["full"].append(everything)  # whichever blocks are lost, all of them go back
            for name, checkpoint in checkpoints.items():
                if name != "full":
                    outcome = _recover(algorithm, checkpoint, [names[block] for block in chosen], now, goal)
                    result.outcomes[lost][name].append(outcome)


def _geometric(random: Generator, length: int) -> int:
    """Draw the iteration of a failure: as likely in each, and on the average in the middle of an undisturbed run."""
    while True:
        iteration = int(random.geometric(min(2 / length, 1.0)))
        if iteration < length:
            return iteration


def _recover(
    watched: Algorithm, saved: RunningCheckpoint, lost: list[str], now: int, goal: _Goal, *, full: bool = False
) -> Outcome:
    """Recover and go on in a fork of this process: it has everything, and here nothing changes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, pickle.dumps(_go_on(watched, saved, lost, now, goal, full=full)))
        except BaseException:  # noqa: BLE001 (there is nobody above: this process is a copy)
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    if not told:
        raise RuntimeError("a recovery ended without a result; it has said why")
    return pickle.loads(told)


def _go_on(
    algorithm: Algorithm, checkpoint: RunningCheckpoint, lost: list[str], now: int, goal: _Goal, *, full: bool
) -> Outcome:
    failure, before = now, state(algorithm.blocks)
    recovery = checkpoint.recover(lost, full=full)
    again = max(recovery.stale.values()) if full else 0  # who goes back altogether draws the same random numbers again
    moved = float(np.linalg.norm(state(algorithm.blocks) - before))
    by_loss, by_distance = None, None
    distances: list[float] = []
    while True:
        if by_loss is None and algorithm.loss() <= goal.target:
            by_loss = now
        if goal.fixed is not None and by_distance is None:
            distances.append(float(np.linalg.norm(state(algorithm.blocks) - goal.fixed)))
            if distances[-1] <= goal.distances[-1]:
                by_distance = now
        if now >= goal.limit or (by_loss is not None and (goal.fixed is None or by_distance is not None)):
            break
        now += 1
        algorithm.iterate(now - again)
    cost = (now if by_loss is None else by_loss) - goal.length
    if by_distance is None:
        return Outcome(cost, by_loss is not None)
    return Outcome(cost, by_loss is not None, _bound(failure, moved, distances, goal), by_distance - goal.length)


def _bound(failure: int, moved: float, distances: list[float], goal: _Goal) -> float | None:
    """Return the theorem's bound, counted from the failure on, with the slowest c of both runs."""
    factors = [after / before for series in (goal.distances, distances) for before, after in pairwise(series)]
    c = max(factors)
    return cost_bound([(0, moved)], distance=float(goal.distances[failure]), c=c) if c < 1 else None
