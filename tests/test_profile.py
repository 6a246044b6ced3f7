"""The profile of a pipeline, from hand-made events and from a real run, and what is refused."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from harness import run_job
from regrow.cli import main
from regrow.courier import Courier
from regrow.run.meter import Meter, link_rate

SCRIPT = Path(__file__).parent / "scripts" / "pipeline.py"
NEIGHBOURS = {0: {1: 100.0}, 1: {0: 60.0, 2: 200.0}, 2: {1: 150.0, 3: 300.0}, 3: {2: 250.0}}


def stage(rank, sent, *, t=10.0, **more):
    fields = {
        "t": t, "event": "stage_profile", "run": "r", "node": 0, "rank": rank, "stage": rank, "pipeline": "p",
        "world": 4, "steps": 10, "busy_s": 0.1 * (rank + 1), "checkpoint_every": 20,
        "sent_bytes": {str(peer): count for peer, count in sent.items()},
    }  # fmt: skip
    return {**fields, **more}


def rates(*given, world=4):
    return [
        {"t": 1.0, "event": "link_rate", "run": "r", "node": 0, "pipeline": "p", "rank": rank,
         "peer": (rank - 1) % world, "bytes_per_s": rate}
        for rank, rate in enumerate(given)
    ]  # fmt: skip


def chain(**more):
    return [*rates(1e9, 2e9, 3e9, 4e9), *(stage(rank, sent, **more) for rank, sent in NEIGHBOURS.items())]


def on_hosts(found, *hosts):
    return [{**event, "node": hosts[event["rank"]]} for event in found]


@pytest.fixture
def profile(tmp_path, capsys):
    """Return the profile of these events, or the error."""

    def make(found, *flags):
        lines = [event if isinstance(event, str) else json.dumps(event) for event in found]
        (tmp_path / "events.0.jsonl").write_text("\n".join(lines) + "\n")
        code = main(["profile", str(tmp_path), *flags])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        if code:
            assert code == 2 and said.err.splitlines()[-1].startswith("regrow profile: error: ")
            return said.err
        return {**json.loads(said.out), "said": said.err}

    return make


def test_each_rank_is_a_machine_of_a_chain(profile):
    made = profile(chain())
    assert made["replay_s"] == pytest.approx([1.0, 2.0, 3.0, 4.0])  # ten steps on average
    assert made["boundary_bytes"] == [160.0, 350.0, 550.0]
    assert (made["bandwidth"], made["checkpoint_every"], made["ranks_per_machine"]) == (2.5e9, 20, 1)
    assert made["said"] == ""


def test_each_host_is_a_machine(profile):
    two = on_hosts(chain(), 0, 0, 1, 1)
    made = profile(two)
    assert made["replay_s"] == pytest.approx([3.0, 7.0])
    assert made["boundary_bytes"] == [350.0]
    assert made["ranks_per_machine"] == 2
    assert made["bandwidth"] == 2e9  # of 1e9 and 3e9, which go from host to host
    assert len(profile(two, "--per", "rank")["replay_s"]) == 4
    assert "there is one host only, so nothing to group: --per rank" in profile(chain(), "--per", "host")


def test_what_is_given_takes_precedence(profile):
    made = profile(chain(), "--bandwidth", "7GB", "--checkpoint-every", "2")
    assert made["replay_s"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert (made["bandwidth"], made["checkpoint_every"]) == (7e9, 2)
    assert "at least 1 step, got 0" in profile(chain(), "--checkpoint-every", "0")
    assert "is no size" in profile(chain(), "--bandwidth", "fast")
    assert "must be a positive number" in profile(chain(), "--bandwidth", "0")


def test_what_is_no_chain_is_refused(profile):
    said = profile([*chain(), stage(3, {2: 250.0, 0: 100.0})])
    assert "no chain: ranks 0 and 3 are not on neighbouring machines and exchange 100 bytes a step" in said
    assert "Interleaved" in said
    made = profile([*chain(), stage(3, {2: 250.0, 0: 1.0})])
    assert made["boundary_bytes"] == [160.0, 350.0, 550.0]
    assert "1 bytes a step between machines that are no neighbours were left out" in made["said"]


def test_ranks_must_lie_in_the_order_of_the_stages(profile):
    found = [stage(rank, sent, stage=3 - rank) for rank, sent in NEIGHBOURS.items()]
    assert "have the ranks 3 | 2 | 1 | 0, but failure domains are ranges" in profile([*rates(1e9), *found])
    assert "have the ranks 0 | 1, 2, 3, but" in profile(on_hosts(chain(), 0, 1, 1, 1))


def test_replicas_of_a_stage_are_one_machine(profile):
    sent = {0: {2: 10.0}, 1: {3: 10.0}, 2: {0: 5.0}, 3: {1: 5.0}}
    beside = [*rates(1e9, 2e9, 3e9, 4e9), *(stage(rank, sent[rank], stage=rank // 2) for rank in range(4))]
    made = profile(beside)
    assert made["replay_s"] == pytest.approx([2.0, 4.0])  # the slower one
    assert (made["boundary_bytes"], made["ranks_per_machine"], made["bandwidth"]) == ([30.0], 2, 2e9)
    apart = [*rates(1e9), *(stage(rank, {}, stage=rank % 2) for rank in range(4))]
    assert "have the ranks 0, 2 | 1, 3, but" in profile(apart)
    assert "stage 0 has replicas on hosts 0, 1" in profile(on_hosts(beside, 0, 1, 0, 1), "--per", "host")


def test_the_last_start_and_the_longest_process_count(profile):
    before = chain(busy_s=9.0, pipeline="older", t=5.0)
    replaced = stage(2, {1: 1.0}, steps=1, busy_s=5.0, t=20.0)
    made = profile([*before, *chain(), replaced])
    assert made["replay_s"] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert made["boundary_bytes"] == [160.0, 350.0, 550.0]


def test_too_little_was_measured(profile):
    assert "too few steps were measured on the ranks" in profile(rates(1e9, 1e9))
    assert "too few steps were measured on ranks 2, 3: let the run go on" in profile(chain()[:-2])
    assert "on rank 3" in profile([*chain()[:-1], stage(3, {}, steps=2)])
    assert "give it with --bandwidth" in profile(chain()[4:])
    assert "every 20, 30 steps: give one" in profile([*chain(), stage(0, {}, checkpoint_every=30)])


def test_damaged_events_are_left_out_and_said(profile):
    bad = [stage(1, {}, busy_s="x"), stage(1, {9: 1.0}), stage(1, {}, busy_s=-1), {**stage(1, {}), "world": None}]
    made = profile([*chain(), *bad, '{"t": 1, "eve'])
    assert made["boundary_bytes"] == [160.0, 350.0, 550.0]
    assert "damaged events that were left out: 4" in made["said"]
    said = profile([event for event in chain() if event["event"] != "stage_profile" or event["rank"] != 1] + bad)
    assert "on rank 1" in said and "(damaged events that were left out: 4)" in said


def test_no_events_and_no_pipeline(tmp_path, profile, capsys):
    assert main(["profile", str(tmp_path / "nowhere")]) == 2
    assert "is not a directory: give the log directory" in capsys.readouterr().err
    assert main(["profile", str(tmp_path)]) == 2
    assert "no events that can be read" in capsys.readouterr().err
    assert "not the events of a pipeline" in profile([{"t": 1.0, "event": "run_started", "world_size": 2}])
    profile(chain())
    assert main(["profile", str(tmp_path), "--output", str(tmp_path / "no" / "p.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_meter_leaves_out_the_first_two_steps_and_interrupted_ones():
    meter = Meter()
    assert meter.totals() == {"steps": 0, "busy_s": None, "sent_bytes": {}}
    clock = 0.0
    for number in range(13):
        meter.begin(clock, 1.0 * number)
        if number == 7:
            meter.begin(clock + 50, 1.0 * number)  # it was interrupted, and waited for a recovery
            clock += 50
        clock += 100.0 if number < 2 else 3.0
        meter.complete(clock, 1.0 * number + 1.0, {1: 10 + number % 2} if number else {1: 1000})
        assert meter.due(clock) == (number == 11)
    assert meter.totals() == {"steps": 11, "busy_s": 2.0, "sent_bytes": {"1": pytest.approx(10 + 5 / 11)}}
    assert not meter.due(clock + 20) and meter.due(clock + 30)


def test_a_lost_rank_leaves_no_rate():
    couriers = [Courier(rank, "127.0.0.1", "secret", print) for rank in range(2)]
    for courier in couriers:
        courier.resume(0, [each.address for each in couriers])
    couriers[1].close()
    assert link_rate(couriers[0], 0, 2, timedelta(seconds=60)) is None
    couriers[0].close()


def test_a_real_pipeline_is_profiled_and_planned(tmp_path, capsys):
    job = run_job("--steps", "14", nproc=3, script=SCRIPT, flags=("--failure-domain", "rank"))
    assert job.code == 0, job.output
    path = tmp_path / "profile.json"
    assert main(["profile", str(job.log_dir), "--output", str(path)]) == 0
    assert f"3 machines in {path}; next: regrow plan logging {path} --cap SIZE" in capsys.readouterr().out
    made = json.loads(path.read_text())
    microbatches, batch, width = 4, 16, 16
    activation_bytes = batch // microbatches * width * 4
    assert made["boundary_bytes"] == [microbatches * activation_bytes * 2] * 2
    assert (made["checkpoint_every"], made["ranks_per_machine"]) == (5, 1)
    assert all(0 < seconds < 10 for seconds in made["replay_s"])
    assert made["bandwidth"] > 1e6
    assert [event["steps"] for event in job.events("stage_profile")] == [10] * 3 + [12] * 3
    assert main(["plan", "logging", str(path), "--cap", "10KB"]) == 0
    said = capsys.readouterr().out
    assert "3 machines, a checkpoint every 5 steps" in said and "--failure-domain 0" in said
