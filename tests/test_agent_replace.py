"""Workers that die, stop, hang or raise, under a real agent: only what died is replaced."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from agent_harness import AT_ONCE_S, Job


@pytest.fixture
def start(tmp_path):
    jobs = []

    def starter(*words, **options):
        jobs.append(Job(tmp_path, *words, **options))
        return jobs[-1]

    yield starter
    for job in jobs:
        job.kill()


def pids(job, what="assign"):
    return {(one["rank"], one["incarnation"]): one["pid"] for one in job.notes(what)}


def test_killed_worker_is_replaced_and_the_others_are_untouched(start):
    job = start("--nproc-per-node", "3", plan={"gate": True})
    victim = job.note("steps done", rank=1)["pid"]
    for rank in (0, 2):
        job.note("steps done", rank=rank)
    killed_t = time.time()
    os.kill(victim, signal.SIGKILL)
    job.note("resumed", rank=1, incarnation=1, generation=1)
    assert job.events("worker_lost")[0]["t_noticed"] - killed_t < AT_ONCE_S
    assert job.events("generation")[0]["t"] - killed_t < AT_ONCE_S
    for rank in (0, 2):
        job.note("resumed", rank=rank, incarnation=0, generation=1)
    job.open_gate()
    assert job.wait() == 0, job.err
    assert set(pids(job)) == {(0, 0), (1, 0), (2, 0), (1, 1)}
    replaced = job.note("assign", rank=1, incarnation=1)
    assert replaced["assign"]["replacement"] and replaced["record"] == "record of 1/0"
    assert replaced["assign"]["env"]["RANK"] == "1" and replaced["assign"]["host_addr"] == "127.0.0.1"
    assert job.note("assign", rank=1, incarnation=0)["assign"]["replacement"] is False
    world = next(one["world"] for one in job.notes("world", rank=0) if one["world"]["generation"] == 1)
    assert [(loss["rank"], loss["why"]) for loss in world["lost"]] == [(1, "SIGKILL")]
    assert world["holders"] == [0, 2] and world["phase"] == "TRAINING"
    assert re.search(r"rank 1 died \(SIGKILL\) at step \d: generation 1, a new process takes over", job.err)
    assert [event["rank"] for event in job.events("worker_lost")] == [1]
    assert [event["generation"] for event in job.events("generation")] == [1]
    assert {event["rank"] for event in job.events("joined")} == {0, 1, 2}
    job.assert_clean()


def test_small_state_path_outlives_the_worker_and_goes_with_the_agent(start):
    job = start("--nproc-per-node", "1", plan={"gate": True})
    path = job.note("assign", rank=0)["assign"]["small_state_path"]
    directory = Path(path).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    job.open_gate()
    assert job.wait() == 0
    assert not directory.exists()


def test_spare_takes_over_and_is_refilled(start):
    job = start("--nproc-per-node", "2", "--spares", "1", plan={"gate": True})
    job.until(lambda: job.events("spare_ready"), "a spare")
    spare = job.notes("start", role="spare")[0]
    assert "RANK" not in spare["env"] and spare["env"]["WORLD_SIZE"] == "2"
    os.kill(job.note("steps done", rank=1)["pid"], signal.SIGKILL)
    took = job.note("assign", rank=1, incarnation=1)
    assert (took["pid"], took["role"], took["record"]) == (spare["pid"], "spare", "record of 1/0")
    job.until(lambda: len(job.events("spare_ready")) == 2, "the refill")
    job.open_gate()
    assert job.wait() == 0, job.err
    assert "spare takes over" in job.err
    job.assert_clean()


def test_spare_that_cannot_wait_is_switched_off(start):
    job = start("--nproc-per-node", "1", "--spares", "1", plan={"gate": True, "bad_spare": True})
    job.until(lambda: "spares are switched off" in job.err, "the sentence")
    job.open_gate()
    assert job.wait() == 0, job.err
    assert len(job.notes("start", role="spare")) == 2
    assert "its last line on stderr: KeyError: 'RANK'" in job.err


def test_spare_that_is_starting_takes_over_when_it_is_there(start):
    job = start("--nproc-per-node", "2", "--spares", "1", plan={"gate": True, "slow_spare": 1.0})
    spare = job.note("start", role="spare")
    os.kill(job.note("steps done", rank=1)["pid"], signal.SIGKILL)
    assert job.note("resumed", rank=1, incarnation=1)["pid"] == spare["pid"]
    job.open_gate()
    assert job.wait() == 0, job.err
    assert "a spare that is starting takes over" in job.err


def test_spare_that_never_gets_there_costs_no_generation(start):
    plan = {"gate": True, "slow_spare": 1.0, "bad_spare": True}
    job = start("--nproc-per-node", "2", "--spares", "1", plan=plan)
    job.note("start", role="spare")
    os.kill(job.note("steps done", rank=1)["pid"], signal.SIGKILL)
    job.note("resumed", rank=1, incarnation=1, generation=1)
    job.open_gate()
    assert job.wait() == 0, job.err
    assert "the spare ended (exit code 1) while it started, a new process takes over" in job.err
    assert [event["generation"] for event in job.events("generation")] == [1]


def test_stopped_worker_is_found_and_replaced(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@2": "stop"}})
    assert job.wait() == 0, job.err
    assert "rank 1 died (stopped, no heartbeat" in job.err
    job.assert_clean()


def test_stuck_worker_is_replaced(start):
    job = start("--nproc-per-node", "2", "--stuck-after", "0.8", plan={"do": {"1/0@2": "stuck"}})
    assert job.wait() == 0, job.err
    assert "rank 1 died (no progress for" in job.err
    job.assert_clean()


def test_worker_that_computes_without_heartbeats_is_left_alone(start):
    job = start("--nproc-per-node", "1", plan={"do": {"0/0@2": "busy"}})
    assert job.wait() == 0, job.err
    assert not job.events("worker_lost")


def test_worker_that_cuts_its_link_is_ended(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@2": "hang"}})
    assert job.wait() == 0, job.err
    assert "closed its connection to the agent but did not end" in job.err
    job.assert_clean()


def test_forked_children_go_with_their_worker(start):
    job = start("--nproc-per-node", "2", plan={"gate": True, "do": {"1/0@2": "fork"}})
    job.note("resumed", rank=1, incarnation=1)
    forked = job.notes("forked")
    job.until(lambda: not {one["pid"] for one in forked} & set(job.living()), "the forked child's end")
    job.open_gate()
    assert job.wait() == 0, job.err
    job.assert_clean()


def test_same_exception_three_times_ends_the_job_with_the_first_traceback(start):
    job = start("--nproc-per-node", "2", plan={"do": {f"1/{n}@2": "raise" for n in range(9)}, "gate": True})
    assert job.wait() == 1
    assert "Traceback (most recent call last): attempt 0" in job.err
    assert "attempt 2" not in job.err
    assert "rank 1 failed at step 2 3 times with ZeroDivisionError: x" in job.err
    assert len(job.events("worker_lost")) == 3
    job.assert_clean()


def test_one_exception_is_healed(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@2": "raise"}})
    assert job.wait() == 0, job.err
    assert [event["kind"] for event in job.events("raised")] == ["ZeroDivisionError"]


def test_max_restarts(start):
    plan = {"do": {f"1/{n}@2": "kill" for n in range(9)}, "gate": True}
    job = start("--nproc-per-node", "2", "--max-restarts", "2", plan=plan)
    assert job.wait() == 1
    assert "3 workers were lost, more than --max-restarts 2 allows" in job.err
    job.assert_clean()


def test_loss_during_setup_restarts_all(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@-1": "kill"}})
    assert job.wait() == 0, job.err
    assert not any(one["assign"]["replacement"] for one in job.notes("assign"))
    assert {(one["rank"], one["incarnation"]) for one in job.notes("end")} == {(0, 1), (1, 1)}
    assert "all start again" in job.err
    job.assert_clean()


def test_loss_of_all_holders_restarts_all(start):
    job = start("--nproc-per-node", "2", plan={"gate": True})
    victims = [job.note("steps done", rank=rank)["pid"] for rank in (0, 1)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    for rank in (0, 1):
        job.until(
            lambda rank=rank: any(one["incarnation"] > 0 for one in job.notes("steps done", rank=rank)), "a new start"
        )
    job.open_gate()
    assert job.wait() == 0, job.err
    assert "no one holds the training state any more" in job.err
    job.assert_clean()


def test_setup_that_always_fails_does_not_go_on_for_ever(start):
    job = start("--nproc-per-node", "1", plan={"no_init": True, "exit": 5})
    assert job.wait() == 1
    assert "rank 0 failed during set-up 3 times with exit code 5" in job.err
    assert len(job.notes("start")) == 3


def test_suspect_makes_a_generation_without_a_loss(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@2": "suspect"}, "gate": True})
    for rank in (0, 1):
        job.note("resumed", rank=rank, incarnation=0, generation=1)
    job.open_gate()
    assert job.wait() == 0, job.err
    assert not job.events("worker_lost")
    assert len(job.events("generation")) == 1


def test_script_without_regrow_just_runs(start):
    job = start("--nproc-per-node", "3", plan={"no_init": True})
    assert job.wait() == 0, job.err


def test_leaving_early_fails_when_others_miss_it(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@2": "leave", "0/0@4": "suspect"}, "gate": True, "steps": 4})
    code = job.wait()
    assert (code, "rank 1 left the training loop at step 2 while others go on" in job.err) == (1, True), job.err
    job.assert_clean()


def test_death_after_the_last_step_fails(start):
    job = start("--nproc-per-node", "2", plan={"do": {"1/0@end": "exit"}})
    assert job.wait() == 1
    assert "rank 1 died (exit code 3) after the last step, in code that regrow does not protect" in job.err


def test_logs_of_every_incarnation(start):
    job = start("--nproc-per-node", "2", "--redirects", "3", "--tee", "0:1", plan={"do": {"1/0@2": "kill"}})
    assert job.wait() == 0, job.err
    text = {path.parent.parent.name + "/" + path.parent.name: path.read_text() for path in job.logs.rglob("stdout.log")}
    assert text["attempt_0/1"] == "hello from rank 1 incarnation 0\n"
    assert text["attempt_1/1"] == "hello from rank 1 incarnation 1\n"
    assert job.out == "[default0]:hello from rank 0 incarnation 0\n"


def test_spare_writes_to_the_log_of_its_rank(start):
    job = start("--nproc-per-node", "2", "--spares", "1", "-r", "1", plan={"gate": True})
    job.until(lambda: job.events("spare_ready"), "a spare")
    os.kill(job.note("steps done", rank=1)["pid"], signal.SIGKILL)
    assert job.note("resumed", rank=1, incarnation=1)["pid"] == job.notes("start", role="spare")[0]["pid"]
    job.open_gate()
    assert job.wait() == 0, job.err
    text = {path.parent.parent.name + "/" + path.parent.name: path.read_text() for path in job.logs.rglob("stdout.log")}
    assert text["attempt_1/1"] == "hello from rank 1 incarnation 1\n"
    assert job.out == ""
