"""Jobs that write checkpoints to storage, lose everything, and go on from there: bit by bit as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import harness
from regrow import events
from regrow.disk import marks
from regrow.disk.storage import Storage
from regrow.testing import Fault

SCRIPTS = Path(__file__).parent / "scripts"
SHARDED, PIPELINE = SCRIPTS / "sharded.py", SCRIPTS / "pipeline.py"
EVERY_2 = ("--ckpt-every", "2")


def flags(directory: Path | str, *more: str) -> tuple[str, ...]:
    return ("--ckpt-dir", str(directory), *(more or EVERY_2))


def cut_power(*args: str, nproc: int, script: Path, directory: Path | str, log_dir: Path, commits: int, more=()) -> int:
    """Start a job and kill all of it, agent and workers, when so many checkpoints are there; return its exit code."""
    command = [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(nproc), "--log-dir", str(log_dir),
        *flags(directory), *more, str(script), *args, "--out", str(log_dir / "out"),
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    try:
        while process.poll() is None and time.monotonic() < deadline:
            done = [e for e in read_events(log_dir) if e["event"] == "disk_committed" and e["rank"] == 0]
            if len(done) >= commits:
                break
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def read_events(log_dir: Path) -> list[dict]:
    return events.read(log_dir) if list(log_dir.glob("events*")) else []


JOBS = {
    "ddp": (harness.SCRIPT, 3, ("--scaler",), ()),
    "pipeline": (PIPELINE, 3, (), ("--failure-domain", "rank")),
}
POINTS = ["disk_write", "disk_mark"]
RESIZED, WHOLES = [(2, 3)], ["fsdp"]
if os.environ.get("REGROW_TEST_ALL"):
    JOBS["ema"] = (harness.SCRIPT, 2, ("--ema",), ())
    JOBS["hsdp"] = (SHARDED, 4, ("--how", "hsdp"), ())
    JOBS["zero"] = (SHARDED, 3, ("--how", "zero"), ())
    JOBS["fsdp"] = (SHARDED, 3, ("--mixed",), ())
    POINTS += ["disk_copy", "disk_written", "disk_rename", "disk_commit"]
    RESIZED, WHOLES = [(2, 3), (3, 2)], ["fsdp", "zero"]


@pytest.mark.parametrize("kind", JOBS)
def test_a_power_cut(kind, tmp_path):
    """All processes are killed; the same command line goes on, and ends as the undisturbed run."""
    script, nproc, args, more = JOBS[kind]
    args = (*args, "--steps", "16")
    expected = harness.undisturbed(*args, nproc=nproc, script=script)
    directory = tmp_path / "ckpt"
    cut = {"nproc": nproc, "script": script, "directory": directory, "log_dir": tmp_path / "cut", "commits": 2}
    assert cut_power(*args, more=more, **cut) == -signal.SIGKILL
    left = marks.usable(Storage.of(str(directory)))
    assert left
    job = harness.run_job(*args, nproc=nproc, script=script, flags=(*flags(directory), *more))
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    begun = {event["step"] for event in job.events("begun_from")}
    assert begun == {left[-1]} and f"goes on at step {left[-1]}" in job.output, job.output
    assert marks.usable(Storage.of(str(directory)))[-1] == 16  # the run's end is there, too
    again = harness.run_job(*args, nproc=nproc, script=script, flags=(*flags(directory), *more))
    assert again.code == 0 and not again.events("disk_committed")  # nothing is left to do
    if kind not in ("ema", "zero"):  # the average has a rank's own buffers, ZeRO's optimizers a learning rate, until
        assert again.digests() == expected.digests()  # the next step


@pytest.mark.parametrize("point", POINTS)
def test_killed_while_a_checkpoint_is_made(point, tmp_path):
    """The others heal the rank from their own state; the checkpoint is made again, or is there."""
    faults = [Fault(point=point, rank=0, step=4), Fault(point=point, rank=1, step=8)]
    deaths = range(1, 3)  # rank 1 never renames; a checkpoint may come two steps later
    job = harness.check(
        "--steps",
        "16",
        nproc=3,
        faults=faults,
        deaths=deaths,
        spares=2,
        flags=flags(tmp_path / "ckpt", "--ckpt-every", "4"),
    )
    found = marks.find(Storage.of(str(tmp_path / "ckpt")))
    assert found[-1].step == 16 and all(one.complete for one in found[-2:]), found
    assert not marks.damage(Storage.of(str(tmp_path / "ckpt")), found[-1]), job.output


def lose_all(tmp_path: Path, event: str, count: int) -> harness.Job:
    """Run a job whose workers are all killed at one moment, when so many of these events were seen."""
    done = threading.Event()

    def kill_all() -> None:
        while not done.wait(0.002):
            seen = read_events(tmp_path / "log")
            if len([one for one in seen if one["event"] == event]) >= count:
                pids = [one["pid"] for one in seen if one["event"] == "worker_started"]
                for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody notices before all are lost
                    for pid in pids:
                        os.kill(pid, number)
                return

    thread = threading.Thread(target=kill_all, name="killer")
    thread.start()
    try:
        more = {"flags": flags(tmp_path / "ckpt", "--ckpt-every", "20"), "log_dir": tmp_path / "log"}
        return harness.check("--steps", "80", nproc=3, faults=[], deaths=3, **more)
    finally:
        done.set()
        thread.join()


def test_all_workers_lost_at_once(tmp_path):
    """The agent lives: replacements find nobody who holds state, but a checkpoint."""
    job = lose_all(tmp_path, "disk_committed", 3)
    assert "load     ranks 0, 1, 2: the job's checkpoint of step" in job.plans()[-1], job.plans()
    assert "from its beginning" not in job.output


def test_lost_before_the_first_checkpoint(tmp_path):
    job = lose_all(tmp_path, "setup_done", 3)
    assert "from its beginning" in job.output


def test_memory_of_a_shard_is_gone(tmp_path):
    """A shard that is in nobody's memory any more is on storage; all go back to there."""
    expected = harness.undisturbed("--steps", "10", nproc=3, script=SHARDED)
    job = harness.run_job(
        "--steps", "10", "--damage", "gone", nproc=3, script=SHARDED, spares=1, flags=flags(tmp_path / "ckpt")
    )
    assert job.code == 0, job.output
    assert job.digests() == expected.digests()
    assert "the state of rank 1 is lost" in job.plans()[-1] and "the job's checkpoint" in job.plans()[-1], job.plans()


def flip(path: Path, at: int = -2000) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path, capfd):
    directory = tmp_path / "ckpt"
    args = ("--steps", "16")
    expected = harness.undisturbed(*args, nproc=2)
    cut = {"nproc": 2, "script": harness.SCRIPT, "directory": directory, "log_dir": tmp_path / "cut", "commits": 3}
    cut_power(*args, **cut)
    left = marks.usable(Storage.of(str(directory)))
    assert len(left) >= 2
    damaged = next((directory / marks.name_of(left[-1])).glob("__1_*.distcp"))
    flip(damaged)
    listed = subprocess.run(
        [sys.executable, "-m", "regrow", "checkpoints", str(directory)], capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 1 and f"{damaged.name} is damaged: it does not match its checksum" in listed.stdout
    assert listed.stdout.count("complete, verified") == len(left) - 1
    job = harness.run_job(*args, nproc=2, flags=flags(directory))
    assert job.code == 0 and job.digests() == expected.digests(), job.output
    assert f"{damaged.name} is damaged" in job.output and f"goes on at step {left[-2]}" in job.output, job.output


def test_stock_pytorch_reads_the_result(tmp_path):
    job = harness.run_job(
        "--steps", "6", "--dump-at", "5", nproc=2, flags=flags(tmp_path / "ckpt", "--ckpt-every", "5")
    )
    assert job.code == 0, job.output
    step5 = tmp_path / "ckpt" / marks.name_of(5)
    command = [sys.executable, str(SCRIPTS / "read_plain.py"), str(step5), "64", "3"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    read = json.loads(plain.stdout)
    dumped = torch.load(job.log_dir / "out" / "step5.rank0.pt", weights_only=True)
    assert read["weights"] == [float(param.double().sum()) for param in dumped["params"]]
    assert read["moments"] == [float(state["exp_avg"].double().sum()) for state in dumped["optimizer"].values()]
    assert {*read["steps"]} == {5.0} and 0 < read["lr"] < 1e-3


@pytest.mark.parametrize("how", WHOLES)
def test_stock_pytorch_reads_shards_as_wholes(how, tmp_path):
    job = harness.run_job(
        "--how", how, "--steps", "4", nproc=3, script=SHARDED, flags=flags(tmp_path / "ckpt", "--ckpt-every", "9")
    )
    assert job.code == 0, job.output
    command = [sys.executable, str(SCRIPTS / "read_whole.py"), str(tmp_path / "ckpt" / marks.name_of(4))]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    read = json.loads(plain.stdout)
    for name, total in job.ranks[0]["sums"].items():
        assert read[f"model.{name}"] == pytest.approx(total, rel=1e-12)
        assert read[f"optimizer.state.{name}.exp_avg_sq"] > 0  # a NaN is not


@pytest.mark.parametrize("before, after", RESIZED)
def test_another_number_of_ranks(before, after, tmp_path):
    directory = tmp_path / "ckpt"
    cut = {"script": harness.SCRIPT, "directory": directory, "log_dir": tmp_path / "cut", "commits": 2}
    cut_power("--layer-norm", "--steps", "40", nproc=before, **cut)
    shutil.copytree(directory, tmp_path / "same")
    job = harness.run_job("--layer-norm", "--steps", "40", nproc=after, flags=flags(directory))
    assert job.code == 0, job.output
    assert "goes on at step" in job.output
    losses = [rank["losses"] for rank in job.ranks.values()]
    assert len(losses) == after and all("39" in each for each in losses)
    again = harness.run_job("--layer-norm", "--steps", "40", nproc=after, flags=flags(directory))
    assert again.code == 0 and again.digests() == job.digests()
    # back to that checkpoint once more, with ranks that are new in it: their random numbers are the same again
    step = int(job.output.partition("goes on at step ")[2].partition(",")[0])
    disturbed = harness.run_job(
        *("--layer-norm", "--steps", "40"),
        nproc=after,
        flags=flags(tmp_path / "same", "--ckpt-every", "1000", "--policy", "checkfreq"),
        faults=[Fault(point="in_backward", rank=1, step=step + 3)],
    )
    assert disturbed.code == 0 and len(disturbed.events("worker_lost")) == 1, disturbed.output
    assert disturbed.digests() == job.digests()


RESHARDED = [("fsdp", 3, 2)]
if os.environ.get("REGROW_TEST_ALL"):
    RESHARDED += [("fsdp", 2, 3), ("zero", 3, 2), ("hsdp", 4, 2)]


@pytest.mark.parametrize("how, before, after", RESHARDED)
def test_shards_among_another_number_of_ranks(how, before, after, tmp_path):
    """Every tensor is cut anew as it is read: the parameters are those that were saved."""
    directory = tmp_path / "ckpt"
    args = ("--how", how, "--steps", "4")
    first = harness.run_job(*args, nproc=before, script=SHARDED, flags=flags(directory))
    again = harness.run_job(*args, nproc=after, script=SHARDED, flags=flags(directory))
    assert first.code == 0 and again.code == 0, again.output
    assert "goes on at step 4" in again.output
    assert again.ranks[0]["sums"] == pytest.approx(first.ranks[0]["sums"], rel=1e-12)
    longer = harness.run_job("--how", how, "--steps", "6", nproc=after, script=SHARDED, flags=flags(directory))
    assert longer.code == 0 and "5" in longer.ranks[0]["losses"], longer.output


def test_another_model_is_refused(tmp_path):
    assert harness.run_job("--steps", "3", nproc=2, flags=flags(tmp_path / "ckpt")).code == 0
    job = harness.run_job("--steps", "3", "--width", "32", nproc=2, flags=flags(tmp_path / "ckpt"))
    assert job.code == 1
    assert "is of another model" in job.output and "give another --ckpt-dir" in job.output, job.output


def test_storage_that_takes_nothing(tmp_path):
    """A full disk: training goes on, and it is said that there is no checkpoint."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("a small file system needs root")
    try:
        job = harness.check("--steps", "9", nproc=2, faults=[], flags=flags(small / "ckpt"))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert "there is no checkpoint of step" in job.output and "No space left on device" in job.output, job.output


def test_storage_that_cannot_be_reached_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    job = harness.run_job("--steps", "3", nproc=2, flags=flags(tmp_path / "file" / "ckpt"))
    assert job.code == 1
    assert "cannot be written to" in job.output and "Traceback" not in job.output, job.output


@harness.thorough
def test_hosts_that_do_not_share_their_storage(tmp_path):
    """Each host's directory has all that its own ranks need."""
    expected = harness.undisturbed("--steps", "8", nproc=4)
    run = partial(harness.run_hosts, "--steps", "8", hosts=2, nproc=2)
    port = harness.free_port()
    jobs = []
    for _ in range(2):
        jobs = run(port=port, own_flags=lambda host: flags(tmp_path / f"host{host}"))
        assert [job.code for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
        ranks = jobs[0].ranks | jobs[1].ranks
        assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    assert "goes on at step 8" in jobs[0].output
    for host in range(2):
        (found,) = [one for one in marks.find(Storage.of(str(tmp_path / f"host{host}"))) if one.step == 8]
        assert found.complete and found.world == 4 and len(found.marks) == 2
