"""Kill workers of a training job before your eyes, and show that its result is the undisturbed one's, bit for bit."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from regrow import testing
from regrow.testing import Fault

HERE = Path(__file__).parent
WORKERS = 4


@dataclass(frozen=True)
class Job:
    """What is trained, and who is killed when."""

    flags: tuple[str, ...]
    script: tuple[str, ...]
    steps: int
    kills: tuple[Fault, ...]
    story: str


DATA_PARALLEL = Job(
    flags=(),
    script=("transformer.py", "--wait-free"),
    steps=120,
    kills=(
        Fault(point="in_backward", rank=0, step=65),
        Fault(point="between_updates", rank=2, step=85),
        Fault(point="before_forward", rank=1, step=108),
        Fault(point="before_forward", rank=3, step=108),
    ),
    story="kill -9 of rank 0, of rank 2 in the middle of a wait-free update, of ranks 1 and 3 at once",
)
PIPELINE = Job(
    flags=("--failure-domain", "rank"),
    script=("pipeline.py",),
    steps=200,
    kills=(
        Fault(point="in_backward", rank=1, step=77, nth=9),
        Fault(point="in_backward", rank=3, step=117, nth=5),
        Fault(point="before_forward", rank=1, step=178),
        Fault(point="before_forward", rank=2, step=178),
    ),
    story="kill -9 of a middle stage, of the last one, of two neighbours at once",
)


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}", flush=True)


def train(job: Job, name: str, home: Path, faults: tuple[Fault, ...], spares: int) -> str:
    """Run the job; return the SHA-256 over all ranks' final states."""
    out, logs = home / name / "out", home / name / "logs"
    script, *arguments = job.script
    command = [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(WORKERS), "--spares", str(spares),
        "--log-dir", str(logs), *job.flags, str(HERE / script), *arguments, "--steps", str(job.steps),
        "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "REGROW_FAULTS": testing.encode(faults)} if faults else dict(os.environ)
    print("$ " + " ".join(["regrow", *command[3:-2]]), flush=True)
    subprocess.run(command, env=environment, check=True, timeout=120)
    digests = [json.loads((out / f"rank{rank}.json").read_text())["digest"] for rank in range(WORKERS)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def main() -> int:
    """Train twice, undisturbed and with four kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", action="store_true", help="four stages of a pipeline instead of four replicas")
    job = PIPELINE if parser.parse_args().pipeline else DATA_PARALLEL
    with tempfile.TemporaryDirectory(prefix="regrow-demo-") as name:
        home = Path(name)
        say(f"an undisturbed run: {WORKERS} workers, {job.steps} steps")
        expected = train(job, "undisturbed", home, (), 0)
        say(f"the same run; {job.story}")
        found = train(job, "disturbed", home, job.kills, 2)
        say("what happened")
        subprocess.run([sys.executable, "-m", "regrow", "report", str(home / "disturbed" / "logs")], check=True)
    say("proof: weights and optimizer state of all ranks")
    print(f"undisturbed  sha256 {expected}\ndisturbed    sha256 {found}")
    same = expected == found
    print(f"final state identical to the undisturbed run: {'yes' if same else 'no'}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
