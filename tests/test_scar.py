"""The experiments of ``make scar``, in small: that the algorithms converge, and that trials measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import scar
import scar_trials
from scar_figures import figures, missed, reduction

SCAR = Path(scar.__file__)


@pytest.mark.parametrize("name", scar.MODELS)
def test_every_algorithm_converges_and_repeats_itself(name):
    first, second = scar.MODELS[name].make(3), scar.MODELS[name].make(3)
    before = first.loss()
    for iteration in range(1, 13):
        first.iterate(iteration)
        second.iterate(iteration)
    assert first.loss() < before
    assert np.array_equal(scar_trials.state(first.blocks), scar_trials.state(second.blocks))


def test_a_full_recovery_costs_the_iterations_since_the_checkpoint_and_partial_recovery_less():
    model = scar.QUICK["mlr_full_batch"]
    run = scar_trials.run(model, 1, 8)
    everything = [outcome.cost for outcome in run.outcomes["1/2"]["full"]]
    assert everything == [failure % model.every for failure in run.failures]
    found = figures([run])
    assert all(found.costs[lost]["partial"].value < found.costs[lost]["full"].value for lost in scar_trials.LOST)
    assert found.bound.checked > 0
    assert found.bound.violated == 0


def test_a_cost_above_its_bound_and_too_small_a_reduction_are_named():
    run = scar_trials.run(scar.QUICK["mlr_full_batch"], 1, 2)
    for methods in run.outcomes.values():
        methods["partial"] = [scar_trials.Outcome(50, True, bound=3.2, distance_cost=5)] * 2
    wrong = missed({"mlr": figures([run])}, ["mlr"])
    assert [sentence for sentence in wrong if "cost more than the bound" in sentence]
    assert [sentence for sentence in wrong if "1/4 lost: partial recovery saves" in sentence]


def test_the_interval_of_a_reduction_is_that_of_paired_trials():
    full = np.array([2.0, 40.0, 8.0, 20.0])
    half = reduction(full / 2, full)
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_quick_run_of_everything_writes_its_figures(tmp_path):
    command = [sys.executable, str(SCAR), "--quick", "--out", str(tmp_path), "--docs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "scar.json").read_text())
    for model in scar.COMPARED:
        for lost in scar_trials.LOST:
            for method in ("partial", "partial_priority", "round_robin", "random"):
                entry = found[model][lost][method]
                assert entry["interval"][0] <= entry["reduction"] <= entry["interval"][1]
            assert found[model][lost]["full"]["cost"] >= 0
    assert (tmp_path / "scar.png").read_bytes().startswith(b"\x89PNG")
    assert "| LDA " in (tmp_path / "scar.md").read_text()
