"""Kill all of a job at random moments of checkpointing, start it again by the same command, and compare its result.

Checkpoints are written all the time. The moment of each kill is drawn from the time between two commits, so it falls
into the copy, the write, the rename, the marks or between them; now and then it comes before the first commit. Mostly
agent and workers are killed, as in a power cut; sometimes all workers at once, and the agent brings them back. Whatever
was committed must be there, whole, and be gone on from; each round's digest must be the undisturbed one's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from regrow import events
from regrow.disk import marks
from regrow.disk.storage import Storage

SCRIPT = Path(__file__).parent.parent / "examples" / "transformer.py"
WORKERS = 2
STEPS = 80
EVERY = 2
PATIENCE_S = 120.0


class Job:
    """One start of the job; ``home`` stays the same from start to start, the logs do not."""

    def __init__(self, home: Path, number: int) -> None:
        self.home, self.logs = home, home / f"logs{number}"
        command = [
            sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(WORKERS), "--log-dir", str(self.logs),
            "--ckpt-dir", str(home / "ckpt"), "--ckpt-every", str(EVERY), str(SCRIPT), "--steps", str(STEPS),
            "--out", str(home / "out"),
        ]  # fmt: skip
        self._noise = (home / f"noise{number}").open("wb")
        self.process = subprocess.Popen(
            command, stdout=self._noise, stderr=self._noise, start_new_session=True, env={**os.environ}
        )

    def events(self, name: str) -> list[dict]:
        found = events.read(self.logs) if list(self.logs.glob("events*")) else []
        return [event for event in found if event["event"] == name]

    def commits(self) -> list[dict]:
        return [event for event in self.events("disk_committed") if event["rank"] == 0]

    def wait_for_commits(self, count: int) -> bool:
        """Whether so many were seen, rather than the end of the job."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.commits()) < count:
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise SystemExit(f"HANG: no checkpoint for {PATIENCE_S:.0f} s; see {self.home}")
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kill the agent and all that it has started; whoever lives on would be seen by the next start."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._noise.close()
        deadline = time.monotonic() + 10
        while any(_lives(event["pid"]) for event in self.events("worker_started")) and time.monotonic() < deadline:
            time.sleep(0.005)

    def kill_workers(self) -> None:
        pids = [event["pid"] for event in self.events("worker_started") if _lives(event["pid"])]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody notices before all are lost
            for pid in pids:
                os.kill(pid, number)

    def finish(self) -> None:
        code = self.process.wait(600)
        self._noise.close()
        if code != 0:
            raise SystemExit(f"exit code {code}; see {self.home}")

    def digest(self) -> str:
        parts = [json.loads((self.home / "out" / f"rank{rank}.json").read_text())["digest"] for rank in range(WORKERS)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def moment(home: Path) -> str:
    """Say from what lies on storage where in its making a checkpoint was."""
    storage = Storage.of(str(home / "ckpt"))
    if any(name.endswith(".part") for name in storage.names()):
        return "while it was written"
    if any(not found.complete for found in marks.find(storage)):
        return "while marks were left"
    return "between two, or while one was copied"


def check(home: Path, committed: int, where: str) -> None:
    """Whatever was committed is there, or something newer is; and it is whole."""
    storage = Storage.of(str(home / "ckpt"))
    usable = marks.usable(storage)
    if committed >= 0 and (not usable or usable[-1] < committed):
        raise SystemExit(f"LOST: step {committed} was committed, there is {usable or 'nothing'} {where}; see {home}")
    wrong = [text for step in usable for text in marks.damage(storage, marks.look(storage, step))]
    if wrong:
        raise SystemExit(f"DAMAGED: {wrong} {where}; see {home}")


def round_of_kills(home: Path, kills: int, dice: random.Random, seen: Counter[str]) -> tuple[int, str]:
    """Kill so often, then let it come to its end; return how many kills there were, and the digest."""
    home.mkdir()
    done, committed, starts, cycle_s = 0, -1, 0, 0.3
    while done < kills:
        job, starts = Job(home, starts), starts + 1
        try:
            if dice.random() < 0.1:
                time.sleep(dice.uniform(0.5, 4.0))  # most likely before its first commit
            elif not job.wait_for_commits(dice.randint(1, 3)):
                break
            if len(job.commits()) > 1:
                stamps = [event["t"] for event in job.commits()]
                cycle_s = (stamps[-1] - stamps[0]) / (len(stamps) - 1)
            time.sleep(dice.uniform(0, cycle_s))
            if dice.random() < 0.2 and job.commits():  # all workers; the agent brings them back
                before = len(job.commits())
                job.kill_workers()
                done += 1
                seen["all workers"] += 1
                if not job.wait_for_commits(before + 1):
                    break
                time.sleep(dice.uniform(0, cycle_s))
        finally:
            ended = job.process.poll()
            job.kill()
        if ended is not None:
            if ended != 0:
                raise SystemExit(f"exit code {ended}; see {home}")
            break  # it was through before the kill came
        done += 1
        committed = max([committed, *(event["step"] for event in job.commits())])
        seen[moment(home)] += 1
        check(home, committed, f"after kill {done}")
    job = Job(home, starts)
    try:
        job.finish()
    finally:
        job.kill()
    begun = {event["step"] for event in job.events("begun_from")}
    if committed >= 0 and (not begun or min(begun) < committed):
        raise SystemExit(f"LOST: the run began from {begun or 'nothing'}, {committed} was committed; see {home}")
    return done, job.digest()


def main() -> None:
    """Run rounds until the kills are used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dice, seen = random.Random(args.seed), Counter[str]()
    home = Path(tempfile.mkdtemp(prefix="regrow-chaos-disk-"))
    _, expected = round_of_kills(home / "0", 0, dice, seen)
    print(f"undisturbed: sha256 {expected[:16]}", flush=True)
    left, rounds = args.kills, 0
    while left > 0:
        rounds += 1
        kills, digest = round_of_kills(home / str(rounds), min(left, 10), dice, seen)
        left -= kills
        same = "identical" if digest == expected else "DIFFERENT"
        print(f"round {rounds}: {kills} kills, sha256 {digest[:16]}, {same}", flush=True)
        if digest != expected:
            raise SystemExit(f"see {home / str(rounds)}")
        shutil.rmtree(home / str(rounds))
    shutil.rmtree(home)
    told = ", ".join(f"{count} {what}" for what, count in seen.most_common())
    print(
        f"{args.kills - left} kills ({told}): always a complete checkpoint, every result identical to the undisturbed"
    )


if __name__ == "__main__":
    main()
