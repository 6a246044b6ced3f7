"""Kill workers of a training job before your eyes, and show that its result is the undisturbed one's, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from regrow import testing

HERE = Path(__file__).parent
WORKERS = 4
STEPS = 120
KILLS = [
    testing.Fault(point="in_backward", rank=0, step=65),
    testing.Fault(point="between_updates", rank=2, step=85),
    testing.Fault(point="before_forward", rank=1, step=108),
    testing.Fault(point="before_forward", rank=3, step=108),
]


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}", flush=True)


def train(name: str, home: Path, faults: list[testing.Fault], spares: int) -> str:
    """Run the job; return the SHA-256 over all ranks' final states."""
    out, logs = home / name / "out", home / name / "logs"
    command = [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(WORKERS), "--spares", str(spares),
        "--log-dir", str(logs), str(HERE / "transformer.py"), "--steps", str(STEPS), "--wait-free", "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "REGROW_FAULTS": testing.encode(faults)} if faults else dict(os.environ)
    print("$ " + " ".join(["regrow", *command[3:-2]]), flush=True)
    subprocess.run(command, env=environment, check=True, timeout=120)
    digests = [json.loads((out / f"rank{rank}.json").read_text())["digest"] for rank in range(WORKERS)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def main() -> int:
    """Train twice, undisturbed and with four kills, and compare."""
    with tempfile.TemporaryDirectory(prefix="regrow-demo-") as name:
        home = Path(name)
        say(f"an undisturbed run: {WORKERS} workers, {STEPS} steps")
        expected = train("undisturbed", home, [], 0)
        say("the same run; kill -9 of rank 0, of rank 2 in the middle of a wait-free update, of ranks 1 and 3 at once")
        found = train("disturbed", home, KILLS, 2)
        say("what happened")
        subprocess.run([sys.executable, "-m", "regrow", "report", str(home / "disturbed" / "logs")], check=True)
    say("proof: weights, optimizer and scheduler state of all ranks")
    print(f"undisturbed  sha256 {expected}\ndisturbed    sha256 {found}")
    same = expected == found
    print(f"final state identical to the undisturbed run: {'yes' if same else 'no'}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
