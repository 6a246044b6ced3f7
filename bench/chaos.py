"""Kill workers of a job at random moments, many times, and compare its result with the undisturbed run's.

Kills are real signals from outside, at random moments and ranks: alone, two at once, a second one while the first is
being healed (a survivor or the very replacement), and now and then SIGSTOP instead of SIGKILL. Nothing may hang, no
step may be lost, and the digest of every round must be the undisturbed one's.
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
import threading
import time
from pathlib import Path

from regrow import events

SCRIPT = Path(__file__).parent.parent / "examples" / "transformer.py"


class Job:
    """One run of the example under ``regrow run``."""

    def __init__(self, home: Path, *, workers: int, spares: int, steps: int, wait_free: bool) -> None:
        self.logs, self.out, self.workers = home / "logs", home / "out", workers
        self.lines: list[str] = []
        self.struck: set[int] = set()
        self.step = 0
        """Where the ranks last went on after a loss."""
        command = [
            sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(workers), "--spares", str(spares),
            "--dead-after", "2", "--max-restarts", "100000", "--log-dir", str(self.logs),
            str(SCRIPT), "--steps", str(steps), "--out", str(self.out), *(["--wait-free"] if wait_free else []),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, name="chaos-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def running(self) -> bool:
        return self.process.poll() is None

    def events(self) -> list[dict]:
        return events.read(self.logs) if self.logs.is_dir() else []

    def pids(self) -> dict[int, int]:
        pids = {}
        for event in self.events():
            if event["event"] in ("worker_started", "spare_assigned") and event.get("rank") is not None:
                pids[event["rank"]] = event["pid"]
        return pids

    def settled(self) -> bool:
        """Whether everyone who was struck is replaced, and every rank trains in the newest generation.

        Without the first half the next kill would come before the last one is noticed, until no rank is left that holds
        the state: then even the best can only begin from the start.
        """
        if self.struck & set(self.pids().values()):
            return False
        generation, resumed, begun = 0, set(), 0
        for event in self.events():
            if event["event"] == "generation":
                generation, resumed = event["generation"], set()
            elif event["event"] == "resumed" and event["generation"] == generation:
                resumed.add(event["rank"])
                self.step = event["step"]
            elif event["event"] == "training":
                begun += 1
        if begun > 1:
            self.end()
            raise SystemExit("LOST STEPS: the run began again from its start\n" + "".join(self.lines[-60:]))
        return begun == 1 and (generation == 0 or len(resumed) == self.workers)

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise SystemExit("HANG: the job did not end\n" + "".join(self.lines[-60:])) from None

    def end(self) -> None:
        if self.running():
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)

    def digest(self) -> str:
        parts = [json.loads((self.out / f"rank{rank}.json").read_text())["digest"] for rank in range(self.workers)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


def strike(job: Job, rank: int, dice: random.Random) -> bool:
    """Send the signal; whether there was a process to get it."""
    pid = job.pids().get(rank)
    number = signal.SIGSTOP if dice.random() < 0.05 else signal.SIGKILL
    try:
        os.kill(pid, number)
    except (ProcessLookupError, TypeError):
        return False
    job.struck.add(pid)
    return True


def burst(job: Job, dice: random.Random) -> int:
    """One, two at once, or a second one while the first is being healed; return how many."""
    kind = dice.choices(("one", "both", "during"), (5, 2, 3))[0]
    first, second = dice.sample(range(job.workers), 2)
    done = strike(job, first, dice)
    if kind == "both":
        done += strike(job, second, dice)
    elif kind == "during":
        time.sleep(dice.uniform(0, 0.6))
        done += strike(job, dice.choice((first, second)), dice)
    return int(done)


def disturbed(job: Job, kills: int, steps: int, dice: random.Random, deadline_s: float) -> int:
    """Let it rain until the kills are used up or the job is nearly done; return how many there were."""
    done, deadline = 0, time.monotonic() + deadline_s
    # the rest of the steps is left in peace: whoever dies after the last one ends the job
    while job.running() and done < kills and job.step < steps - 40:
        if time.monotonic() > deadline:
            job.end()
            raise SystemExit(f"HANG: no progress after {done} kills\n" + "".join(job.lines[-80:]))
        if not job.settled():
            time.sleep(0.02)
            continue
        time.sleep(dice.uniform(0, 0.4))
        done += burst(job, dice)
        deadline = time.monotonic() + deadline_s
    return done


def main() -> None:
    """Run rounds until the kills are used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--spares", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="steps of a round")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.workers < 3:
        parser.error("--workers must be at least 3: two are killed at once, and one must be left that holds the state")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended, too
    dice = random.Random(args.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    home = Path(tempfile.mkdtemp(prefix="regrow-chaos-"))
    try:
        struck, rounds = rain(args, home, dice)
    except BaseException:
        print(f"logs and events of every round: {home}", file=sys.stderr)
        raise
    shutil.rmtree(home)
    print(f"{struck} kills in {rounds} rounds: no hang, every result identical to the undisturbed run")


def rain(args: argparse.Namespace, home: Path, dice: random.Random) -> tuple[int, int]:
    """An undisturbed round, then disturbed ones until the kills are used up; return how many of both."""
    left, rounds, expected = args.kills, 0, ""
    while rounds == 0 or left > 0:
        job = Job(
            home / str(rounds), workers=args.workers, spares=args.spares, steps=args.steps, wait_free=rounds % 2 == 1
        )
        try:
            kills = disturbed(job, left, args.steps, dice, 60.0) if rounds else 0
            code = job.wait(600.0)
        finally:
            job.end()
        if code != 0:
            raise SystemExit(f"round {rounds}: exit code {code}\n" + "".join(job.lines[-80:]))
        digest = job.digest()
        expected = expected or digest
        left -= kills
        generations = sum(event["event"] == "generation" for event in job.events())
        fate = "undisturbed" if rounds == 0 else f"{kills} kills, {generations} generations"
        same = digest == expected
        print(f"round {rounds}: {fate}, sha256 {digest[:16]}, {'identical' if same else 'DIFFERENT'}", flush=True)
        if not same:
            raise SystemExit("".join(line for line in job.lines if "regrow" in line))
        rounds += 1
    return args.kills - left, rounds - 1


if __name__ == "__main__":
    main()
