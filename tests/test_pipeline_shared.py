"""Let idle ranks compute micro-batches of a lost stage, and compare with the undisturbed run, bit by bit."""

from __future__ import annotations

import pytest

from harness import cases, thorough
from regrow.testing import Fault
from test_pipeline import JOURNALED, check

SHARED = ("--share", "--norm", "layer", "--microbatches", "8")
BY_THREE = (*JOURNALED, "--replay-helpers", "3")


def shared_steps(job, helpers: int) -> int:
    """How many steps were done with so many helpers."""
    return sum(event["steps"].get(str(helpers), 0) for event in job.events("replay_shared"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", cases("1f1b", rest=["gpipe", "interleaved"]))
def test_first_middle_and_last_stage_of_every_schedule(schedule):
    faults = [Fault(point="in_backward", rank=rank, step=step, nth=3) for rank, step in ((1, 9), (3, 14), (0, 19))]
    args = (*SHARED, "--schedule", schedule, "--steps", "21", "--every", "5")
    job = check(*args, nproc=4, faults=faults, spares=2, flags=BY_THREE)
    assert all("micro-batches shared with ranks" in plan for plan in job.plans()), job.plans()
    # the first step of each replay is done alone
    assert shared_steps(job, 3) >= 3 * 2, job.events("replay_shared")


def test_as_many_help_as_make_it_faster():
    job = check(
        *SHARED,
        "--steps",
        "14",
        "--every",
        "12",
        nproc=3,
        spares=1,
        faults=[Fault(point="in_backward", rank=1, step=11)],
    )
    (event,) = job.events("replay_shared")
    assert event["helpers"] == [0, 2] and event["steps"]["2"] >= 1, event


@thorough
def test_under_autocast():
    args = (*SHARED, "--autocast", "--steps", "12", "--every", "10")
    job = check(*args, nproc=3, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1, flags=BY_THREE)
    assert shared_steps(job, 2) >= 7, job.output


def test_a_helper_dies_and_then_the_one_that_is_helped():
    faults = [
        Fault(point="in_backward", rank=1, step=9),
        Fault(point="helping", rank=3, step=4),
        Fault(point="in_backward", rank=1, step=6),
    ]
    check(*SHARED, "--steps", "13", "--every", "10", nproc=4, faults=faults, spares=2, flags=BY_THREE)


def test_a_helper_that_has_completed_the_last_step():
    faults = [Fault(point="step_end", rank=0, step=8)]
    job = check(*SHARED, "--steps", "9", "--every", "10", nproc=3, faults=faults, spares=1, flags=BY_THREE)
    assert shared_steps(job, 2) >= 6, job.output


@thorough
def test_a_schedule_that_runs_twice_in_a_step_adds_to_the_gradients_of_the_first_time():
    args = (*SHARED, "--twice", "--steps", "12", "--every", "10")
    job = check(*args, nproc=4, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1)
    (event,) = job.events("replay_shared")
    assert sum(steps for size, steps in event["steps"].items() if size != "0") >= 3, (
        event
    )  # so many are tried, whatever they give


@thorough
def test_a_loss_that_draws_random_numbers_is_noticed():
    args = (*SHARED, "--noisy-loss", "--steps", "12", "--every", "10")
    job = check(*args, nproc=3, faults=[Fault(point="in_backward", rank=2, step=9)], spares=1, flags=BY_THREE)
    assert "rank 2: the replay goes on without help: something else than its forward draws" in job.output, job.output


@thorough
def test_averages_of_batch_norm_are_made_alone():
    args = ("--share", "--microbatches", "8", "--steps", "12", "--every", "10")
    job = check(*args, nproc=3, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1)
    assert "rank 1: the replay goes on without help: its forward writes to buffers" in job.output


def test_draws_that_depend_on_the_input_are_noticed_and_done_alone():
    """RReLU draws a number for each negative input."""
    args = ("--share", "--norm", "none", "--microbatches", "8", "--steps", "12", "--every", "10")
    job = check(*args, nproc=3, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1, flags=BY_THREE)
    assert "drew other random numbers than the first one did" in str(job.events("woken")), job.events("woken")
    assert "shared" in job.plans()[0] and "shared" not in job.plans()[-1], job.plans()


@thorough
def test_hooks_of_the_script_are_not_forgotten():
    """They change the gradients of every micro-batch; what ``build_stage`` gives has none."""
    args = ("--share", "unhooked", *SHARED[1:], "--steps", "12", "--every", "10")
    job = check(*args, nproc=3, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1)
    assert job.output.count("cannot help: build_stage gives something else") == 2, job.output


@pytest.mark.parametrize(
    "how, said",
    cases(
        ("elsewhere", "its build_stage computes something else than this rank's stage"),
        rest=[
            ("raises", "build_stage raised ValueError: no such stage here"),
            ("smaller", "build_stage gives something else than the stage: other parameters, buffers, parts or hooks"),
            ("otherwise", "build_stage gives something else than the stage"),
        ],
    ),
)
def test_a_helper_that_builds_something_else_is_not_used(how, said):
    args = ("--share", how, *SHARED[1:], "--steps", "12", "--every", "10")
    job = check(*args, nproc=3, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1, flags=BY_THREE)
    assert f"rank 1: rank 0 cannot help: {said}" in job.output, job.output
    assert shared_steps(job, 1) >= 6 and not shared_steps(job, 2), job.events("replay_shared")


@thorough
def test_helpers_with_another_backward_or_a_forward_that_raises_are_not_used():
    """Nothing but computing a micro-batch shows it: they are built of the same parts."""
    args = ("--share", "unlike", *SHARED[1:], "--steps", "12", "--every", "10")
    job = check(*args, nproc=4, faults=[Fault(point="in_backward", rank=1, step=9)], spares=1, flags=BY_THREE)
    other = "its build_stage computes something else than this rank's stage"
    raised = "its forward or backward raised ValueError: not on this rank"
    assert f"rank 1: rank 0 cannot help: {other}" in job.output, job.output
    assert f"rank 1: rank 2 cannot help: {raised}" in job.output, job.output
    assert shared_steps(job, 1) >= 6 and not shared_steps(job, 2), job.events("replay_shared")
