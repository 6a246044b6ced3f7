"""The same training under other systems' policies: all go back to what was saved, and end as the undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from regrow.agent.happenings import Exited, Finished, Forgotten, Lost, LostWorker, SetupDone, Suspect
from regrow.agent.membership import decide
from regrow.agent.world import Phase, World
from regrow.errors import StartOver, Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan import Holding, Indices, Load, Own, Restore, Settle, make_plan
from regrow.rules import Policy, Rules
from regrow.run import refusals
from regrow.testing import Fault

SHARDED = Path(__file__).parent / "scripts" / "sharded.py"
PIPELINE = SHARDED.with_name("pipeline.py")

# what is planned -----------------------------------------------------------------------------------------------------


def held(rank: int, step: int | None, *, commits: tuple[int, ...] = (), disk: tuple[int, ...] = (), **more) -> Holding:
    return Holding(
        rank=Rank(rank),
        step=None if step is None else Step(step),
        params=4,
        layout="same",
        place="whole",
        snapshots=tuple((Step(step), 0) for step in commits),
        disk=tuple(map(Step, disk)),
        **more,
    )


def plan_of(policy: Policy, *holdings: Holding):
    return make_plan(holdings, Rules(policy=policy))


@pytest.mark.parametrize("policy", [Policy.CHECKFREQ, Policy.RESTART])
def test_everyone_loads_the_newest_checkpoint_that_all_see(policy):
    plan = plan_of(policy, held(0, 9, disk=(3, 6)), held(1, None, disk=(3, 6, 8)), held(2, 8, disk=(6,)))
    assert [action for action in plan.actions if isinstance(action, Load)] == [
        Load(rank=Rank(rank), step=Step(6), whole=True) for rank in range(3)
    ]
    assert plan.step == 6 and "3 steps are done again" in plan.reason


def test_nothing_on_storage_is_a_new_beginning():
    for disk in ((), (3,)):
        with pytest.raises(StartOver, match="no checkpoint on storage yet that every rank sees"):
            plan_of(Policy.CHECKFREQ, held(0, 2, disk=disk), held(1, None))


def test_everyone_takes_the_last_commit_also_who_stands_there():
    plan = plan_of(
        Policy.COMMIT,
        held(0, 12, commits=(4, 8)),
        held(1, None, commits=(4, 8)),
        held(2, 8, commits=(8,), updated=Indices.span(2)),
    )
    assert [action for action in plan.actions if isinstance(action, Restore)] == [
        Restore(rank=Rank(rank), step=Step(8)) for rank in range(3)
    ]
    assert {action.own for action in plan.actions if isinstance(action, Settle)} == {Own.SNAPSHOT}
    assert "4 steps are done again" in plan.reason


def test_a_commit_that_not_all_have_is_none():
    assert plan_of(Policy.COMMIT, held(0, 9, commits=(4, 8)), held(1, None, commits=(4,))).step == 4


def test_a_commit_of_a_future_that_was_given_up_is_none():
    line = ((3, Step(4)),)
    plan = plan_of(Policy.COMMIT, held(0, 9, commits=(4, 8), line=line), held(1, None, commits=(4, 8), line=line))
    assert plan.step == 4


def test_without_commits_storage_is_next():
    lost = held(1, None, disk=(2, 5))
    plan = plan_of(Policy.COMMIT, held(0, 9, commits=(8,), disk=(5,)), lost)
    assert {action.step for action in plan.actions if isinstance(action, Load)} == {5}
    with pytest.raises(Unrecoverable, match="no commit any more that every rank has a copy of") as stop:
        plan_of(Policy.COMMIT, held(0, 9, commits=(8,)), held(1, None))
    assert not isinstance(stop.value, StartOver)


# what becomes of the world -------------------------------------------------------------------------------------------


def after(world, *events):
    for event in events:
        world = decide(world, event).world
    return world


def restarting(max_restarts=2):
    world = World.first([3], max_restarts, 0.0, policy=Policy.RESTART)
    return after(world, *(SetupDone(rank, 0) for rank in range(3)))


def lost(*ranks, incarnation=0):
    return Lost(tuple(LostWorker(rank, incarnation, "SIGKILL", 5) for rank in ranks), t=7.0)


def test_any_loss_starts_all_anew_and_counts_once():
    world = after(restarting(), lost(1, 2))
    assert (world.phase, world.incarnation, world.holders, world.restarts) == (Phase.SETUP, (1, 1, 1), (), 1)
    assert "restart 1 of 2 at most, all workers are killed and start from storage" in world.reason
    assert World.loads(world.dumps()) == world
    again = after(world, SetupDone(0, 1), lost(0, incarnation=1))
    assert (again.phase, again.incarnation, again.ready, again.restarts) == (Phase.SETUP, (2, 2, 2), (), 2)
    assert decide(again, lost(1, incarnation=1)).world is again  # one of those that were killed
    ended = after(again, *(SetupDone(rank, 2) for rank in range(3)), lost(1, incarnation=2))
    assert ended.phase is Phase.FAILED and "once more than --max-restarts 2 allows" in ended.reason


def test_a_lost_connection_starts_all_anew_too():
    world = after(restarting(1), Suspect(0, 0, 0, "it broke"))
    assert (world.phase, world.generation, world.restarts) == (Phase.SETUP, 1, 1)
    assert "restart 1 of 1" in world.reason
    world = after(world, *(SetupDone(rank, 1) for rank in range(3)), Suspect(0, 1, 1, "it broke"))
    assert world.phase is Phase.FAILED


def test_the_end_is_an_end():
    world = after(restarting(), *(Finished(rank, 0, 0) for rank in range(3)), *(Exited(rank, 0) for rank in range(3)))
    assert world.phase is Phase.DONE and world.restarts == 0


def test_survivors_give_up_what_they_hold_if_the_policy_says_so():
    world = after(World.first([2], 9, 0.0), SetupDone(0, 0), SetupDone(1, 0), lost(1))
    assert decide(world, Forgotten(0, 0, 1, "no checkpoint")).world is world
    begun = after(world, Forgotten(0, 0, 1, "no checkpoint", everyone=True))
    assert (begun.phase, begun.generation, begun.incarnation) == (Phase.SETUP, 2, (1, 2))
    assert begun.reason == "no checkpoint: the run starts again from its beginning"
    assert decide(begun, Forgotten(1, 1, 1, "no checkpoint", everyone=True)).world is begun


# jobs ----------------------------------------------------------------------------------------------------------------

FAULTS = [
    Fault(point="in_backward", rank=1, step=1),  # before the first checkpoint
    Fault(point="after_update", rank=0, step=7),
    Fault(point="in_backward", rank=1, step=10),
    Fault(point="in_backward", rank=2, step=10),
    Fault(point="in_backward", rank=0, step=13, action="stop"),
]
RECOVERY = [Fault(point="rejoin", rank=2, nth=2), Fault(point="before_transfer", rank=0, nth=2)]
FEW = [*FAULTS[1:4], Fault(point="rejoin", rank=0, nth=1)]
STEPS = ("--steps", "16")


def run(policy: str, faults: list[Fault], *flags: str, args: tuple[str, ...] = (), script=harness.SCRIPT, nproc=3):
    """Run a job whose result must be that of the undisturbed one."""
    flags = ("--policy", policy, "--dead-after", "1", *flags)
    job = harness.run_job(*STEPS, *args, nproc=nproc, faults=faults, flags=flags, spares=1, script=script)
    assert job.code == 0, job.output
    assert job.digests() == harness.undisturbed(*STEPS, nproc=nproc, script=script).digests(), job.output
    return job


def stored(directory: Path) -> tuple[str, ...]:
    return ("--ckpt-dir", str(directory), "--ckpt-every", "3")


def report_on(job: harness.Job) -> str:
    command = [sys.executable, "-m", "regrow", "report", str(job.log_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def started(job: harness.Job) -> int:
    """How many processes have been given a rank."""
    return len(job.events("worker_started")) + len(job.events("spare_assigned"))


def check_loads(job: harness.Job) -> None:
    assert job.plans() and all("load     ranks 0, 1, 2: the job's checkpoint" in plan for plan in job.plans())
    assert not any(word in plan for plan in job.plans() for word in ("copy ", "undo ", "restore "))
    assert not job.events("snapshots")


def test_checkfreq(tmp_path):
    """With updates within the backward, too: they do not begin before the checkpoint is copied."""
    job = run("checkfreq", [*FAULTS, *RECOVERY], *stored(tmp_path), args=("--wait-free",))
    assert "no checkpoint on storage yet that every rank sees: the run starts again from its beginning" in job.output
    check_loads(job)
    assert len(job.events("worker_lost")) == 7
    report = report_on(job)
    assert ", policy checkfreq" in report and "set up anew" in report and "checkpoints: of " in report, report
    assert "(training went on with step 0)" in report and "nobody said" not in report, report


@harness.thorough
def test_checkfreq_of_shards(tmp_path):
    job = run("checkfreq", FEW, *stored(tmp_path), script=SHARDED)
    check_loads(job)
    assert started(job) == 3 + len(FEW)  # those who live keep their processes


@pytest.mark.parametrize("script, faults", harness.cases((harness.SCRIPT, [*FAULTS, *RECOVERY]), rest=[(SHARDED, FEW)]))
def test_commit(script, faults):
    job = run("commit", faults, "--commit-every", "3", script=script)
    assert "from its beginning" not in job.output
    assert job.plans() and all("restore  ranks 0, 1, 2: the snapshot of step" in plan for plan in job.plans())
    assert {event["step"] % 3 for event in job.events("plan")} == {0}
    assert started(job) == 3 + len(faults) and "policy commit" in report_on(job)


def check_restarts(job: harness.Job, least: int, most: int) -> None:
    said = [line for line in job.output.splitlines() if "all workers are killed and start from storage" in line]
    assert [f"restart {number} of 100" in line for number, line in enumerate(said, 1)] == [True] * len(said)
    assert least <= len(said) <= most and started(job) == 3 + 3 * len(said), job.output
    assert f"{len(said)} restarts on the way" in job.output
    assert not job.plans() and not job.events("snapshots")
    assert "goes on at step" in job.output
    report = report_on(job)
    assert "set up anew" in report and "nobody said" not in report, report
    assert "replacement ready" not in report and "policy restart" in report, report


def test_restart(tmp_path):
    """All are new each time, however many were lost together."""
    check_restarts(run("restart", FAULTS, *stored(tmp_path)), 4, 5)


@harness.thorough
def test_restart_of_shards_on_two_hosts(tmp_path):
    """One is lost in the set-up, too: both hosts start it again."""
    flags = ("--policy", "restart", *stored(tmp_path))
    faults = [Fault(point="in_backward", rank=0, step=8)]
    args = (*STEPS, "--strike", "kill", "1", "-1")
    jobs = harness.run_hosts(*args, hosts=2, nproc=1, faults=faults, flags=flags, script=SHARDED)
    assert [job.code for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    ranks = jobs[0].ranks | jobs[1].ranks
    expected = harness.undisturbed(*STEPS, nproc=2, script=SHARDED)
    assert [ranks[rank]["digest"] for rank in range(2)] == expected.digests()
    assert [started(job) for job in jobs] == [3, 3]
    assert "goes on at step" in jobs[0].output and "2 restarts on the way" in jobs[0].output, jobs[0].output


def test_hosts_that_would_go_back_differently_are_refused():
    refusals.check_policies([["commit", 10], ["commit", 10]])
    with pytest.raises(ValueError, match="rank 0 was started with --policy commit 10, rank 1 with commit 4: give all"):
        refusals.check_policies([["commit", 10], ["commit", 4]])
    with pytest.raises(ValueError, match="--policy ladder, rank 2 with restart"):
        refusals.check_policies([["ladder", None], ["ladder", None], ["restart", None]])


def test_hosts_that_would_write_checkpoints_of_other_steps_are_refused():
    refusals.check_checkpointing([None, None])
    refusals.check_checkpointing([[5, 0.035, None], [5, 0.035, None]])
    with pytest.raises(ValueError, match="rank 0 was started with --ckpt-every auto, rank 1 with 5: give all hosts"):
        refusals.check_checkpointing([[None, 0.035, None], [5, 0.035, None]])
    with pytest.raises(ValueError, match="--mtbf 3600, rank 1 with 60"):
        refusals.check_checkpointing([[5, 0.035, 3600.0], [5, 0.035, 60.0]])
    with pytest.raises(ValueError, match="rank 1 was started with --ckpt-dir, rank 0 without"):
        refusals.check_checkpointing([None, [5, 0.035, None]])


def test_what_a_policy_does_not_know_is_refused():
    refusals.check_policy(Policy.COMMIT, staged=False)
    refusals.check_policy(Policy.CHECKFREQ, staged=True)
    with pytest.raises(ValueError, match="--policy commit does not know pipelines"):
        refusals.check_policy(Policy.COMMIT, staged=True)


if os.environ.get("REGROW_TEST_ALL"):  # starting a job takes seconds: `make test-all`

    def test_a_commit_that_is_gone_ends_the_run():
        flags = ("--policy", "commit", "--commit-every", "2")
        job = harness.run_job("--steps", "9", "--strike", "drop", "1", "5", nproc=2, flags=flags, script=SHARDED)
        assert job.code == 1 and "no commit any more that every rank has a copy of" in job.output, job.output

    @pytest.mark.parametrize("policy", ["checkfreq", "restart"])
    def test_a_pipeline(policy, tmp_path):
        faults = [Fault(point="in_backward", rank=1, step=7), Fault(point="in_backward", rank=2, step=11)]
        flags = (*stored(tmp_path), "--failure-domain", "rank")
        job = run(policy, faults, *flags, script=PIPELINE)
        assert not job.events("checkpoint_written") and not job.events("replayed")
