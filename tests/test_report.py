"""The report on hand-made events."""

import json

import pytest

from regrow import cli, events, report


def write(directory, node, *lines):
    with (directory / f"events.{node}.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"run": "r1", "node": node, **line}) + "\n")


@pytest.fixture
def run_dir(tmp_path):
    write(
        tmp_path,
        0,
        {"t": 100.0, "event": "run_started", "world_size": 2},
        {"t": 105.0, "event": "training", "generation": 0},
        {"t": 110.01, "event": "generation", "generation": 1, "reason": "rank 1 lost: replaced",
         "lost": [{"rank": 1, "why": "SIGKILL", "t": 110.0}]},
        {"t": 110.02, "event": "woken", "generation": 1, "rank": 0, "step": 41},
        {"t": 110.10, "event": "joined", "generation": 1, "rank": 0},
        {"t": 110.15, "event": "plan", "generation": 1, "rank": 0, "lines": ["Copy(rank=1, source=0, step=41)"],
         "reason": "rank 0 has it all"},
        {"t": 110.30, "event": "transferred", "generation": 1, "rank": 0, "bytes_in": 0, "bytes_out": 8_000_000,
         "seconds": 0.1},
        {"t": 110.40, "event": "resumed", "generation": 1, "rank": 0, "step": 41},
        {"t": 130.0, "event": "done", "generation": 1, "reason": "all workers have ended with exit code 0"},
    )  # fmt: skip
    write(
        tmp_path,
        1,
        {"t": 110.0, "event": "worker_lost", "rank": 1, "why": "SIGKILL", "step": 41, "t_noticed": 110.0},
        {"t": 110.05, "event": "replacement_ready", "generation": 1, "rank": 1},
        {"t": 110.12, "event": "joined", "generation": 1, "rank": 1},
        {"t": 110.35, "event": "transferred", "generation": 1, "rank": 1, "bytes_in": 8_000_000, "seconds": 0.15},
        {"t": 110.50, "event": "resumed", "generation": 1, "rank": 1, "step": 41},
    )
    return tmp_path


def test_read_merges_by_time_and_tolerates_a_torn_line(run_dir):
    with (run_dir / "events.1.jsonl").open("a") as file:
        file.write('{"t": 111.0, "event": "resu')
    found = events.read(run_dir)
    assert [event["t"] for event in found] == sorted(event["t"] for event in found)
    assert len(found) == 14


def test_failure_is_told_from_the_events(run_dir):
    (failure,) = report.failures(events.read(run_dir))
    assert failure.who == ("rank 1 died (SIGKILL) at step 41",)
    assert failure.plan == ("Copy(rank=1, source=0, step=41)",)
    assert (failure.bytes_in, failure.step, failure.ended) == (8_000_000, 41, "")
    assert failure.reached_s == pytest.approx(
        {"severed": 0.02, "replacement ready": 0.05, "reconnected": 0.12, "planned": 0.15, "transferred": 0.35,
         "resumed": 0.5}
    )  # fmt: skip


def test_printed_report(run_dir, capsys):
    assert cli.main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    for part in (
        "run r1, 2 workers",
        "generation 1: rank 1 died (SIGKILL) at step 41",
        "plan     Copy(rank=1, source=0, step=41)",
        "moved    8.0 MB in 0.150 s",
        "reconnected          0.070 s   (after 0.120 s)",
        "total                0.500 s   (training went on with step 41)",
        "1 failure, 1 worker lost, healed 1 time",
        "done after 30.0 s: all workers have ended with exit code 0",
    ):
        assert part in out


def test_overtaken_and_failed_generations(run_dir, capsys):
    write(
        run_dir,
        0,
        {"t": 120.0, "event": "generation", "generation": 2, "lost": [], "reason": "suspect"},
        {"t": 120.1, "event": "woken", "generation": 2, "rank": 0, "step": 50},
        {"t": 120.2, "event": "generation", "generation": 3, "lost": [], "reason": "suspect"},
        {"t": 120.3, "event": "failed", "generation": 3, "reason": "too many"},
    )
    one, two, three = report.failures(events.read(run_dir))
    assert (one.ended, two.ended, three.ended) == ("", "overtaken by generation 3", "the run failed: too many")
    assert report.print_report(run_dir) == 0
    assert "nobody died" in capsys.readouterr().out


def test_runs_in_one_directory_are_told_apart(run_dir, capsys):
    write(run_dir, 0, {"t": 200.0, "event": "run_started", "run": "r2", "world_size": 1})
    assert report.print_report(run_dir) == 0
    out = capsys.readouterr().out
    assert out.index("run r1") < out.index("run r2")
    assert "the run has no end" in out


def test_nothing_to_report(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"regrow report: error: no events in {tmp_path}")
    assert cli.main(["report", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"regrow report: error: {tmp_path / 'none'} is not a directory\n"


def test_event_log_appends_and_flushes(tmp_path):
    log = events.EventLog(tmp_path, 3, "r")
    log.append("one", rank=1)
    log.append("two", t=1.0)
    assert [(event["event"], event["node"], event["run"]) for event in events.read(tmp_path)] == [
        ("two", 3, "r"),
        ("one", 3, "r"),
    ]
    log.close()
    log.append("dropped")
    assert len(events.read(tmp_path)) == 2


def test_a_full_disk_costs_events_and_nothing_else(tmp_path, capsys):
    (tmp_path / "events.0.jsonl").symlink_to("/dev/full")
    log = events.EventLog(tmp_path, 0, "r")
    log.append("one")
    log.append("two")
    said = capsys.readouterr().err
    assert said.count("No space left on device: events are missing from here on") == 1
    log.close()


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path):
    class Disk:
        """Takes ten bytes of the first line."""

        name, closed, data = "events", False, b""

        def write(self, data):
            taken = data if self.data else data[:10]
            self.data += taken
            return len(taken)

    log = events.EventLog(tmp_path, 0, "r")
    log.close()
    log._file = disk = Disk()
    log.append("one")
    log.append("two")
    log.append("three")
    (tmp_path / "events.0.jsonl").write_bytes(disk.data)
    assert [event["event"] for event in events.read(tmp_path)] == ["two", "three"]


def test_who_helped_with_a_replay(run_dir, capsys):
    shared = {"steps": {"0": 1, "3": 2}, "seconds": {"0": 0.2, "3": 0.06}, "why_not": ""}
    write(
        run_dir, 0, {"t": 111.0, "event": "replay_shared", "generation": 1, "rank": 1, "helpers": [0, 2, 3], **shared}
    )
    assert cli.main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "shared   1 step alone (0.200 s each), 2 steps with 3 helpers (0.060 s each)\n" in out


def test_why_nobody_helped_with_a_replay(run_dir, capsys):
    write(
        run_dir, 0, {"t": 111.0, "event": "replay_shared", "generation": 1, "rank": 1, "why_not": "it writes buffers"}
    )
    assert cli.main(["report", str(run_dir)]) == 0
    assert "shared   not at all: it writes buffers\n" in capsys.readouterr().out
