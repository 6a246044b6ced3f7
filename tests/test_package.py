"""The package as a whole: what it shows, what importing it does, which part may know which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import regrow
from harness import run_job

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "regrow"

BOTTOM = {"ids", "errors", "wire", "events", "slots", "lifeline", "fence", "door", "rules"}
MAY_KNOW = {
    "ids": set(),
    "errors": set(),
    "wire": set(),
    "events": set(),
    "slots": {"ids"},
    "lifeline": set(),
    "fence": set(),
    "door": {"wire"},
    "sizes": set(),
    "rules": set(),
    "files": set(),
    "plan": {"ids", "errors", "sizes", "rules"},
    "undo": {"errors", "optim"},
    "optim": set(),
    "data": {"errors"},
    "digest": set(),
    "testing": set(),
    "group": {"errors"},
    "ddp": {"group"},
    "dial": set(),
    "journal": {"errors", "wire", "dial", "door"},
    "courier": {"errors", "wire", "dial", "door"},
    "state": {"ids", "errors", "plan", "slots", "testing", "files"},
    "disk": {"ids", "state", "files"},
    "peer": {"ids", "wire", "dial", "door", "slots"},
    "iterative": {"plan", "files"},
    "fsdp": set(),
    "pieces": set(),
    "updates": {"ids", "pieces", "plan", "state", "undo", "ddp", "testing"},
    "run": {
        *BOTTOM,
        "plan",
        "undo",
        "data",
        "testing",
        "group",
        "ddp",
        "fsdp",
        "state",
        "journal",
        "courier",
        "peer",
        "disk",
        "iterative",
        "sizes",
        "updates",
    },
    "agent": {*BOTTOM, "peer"},
    "report": {"events"},
    "explain": {"events", "errors", "plan", "rules"},
    "logging_plan": {"plan", "sizes"},
    "placement_plan": {"plan", "sizes"},
    "profile": {"events", "sizes"},
    "checkpoints": {"disk", "sizes"},
    "cli": {"agent", "rules", "report", "explain", "profile", "checkpoints", "logging_plan", "placement_plan"},
}


def imported(path: Path) -> set[str]:
    """The parts of regrow that a module names in its imports, relative ones resolved."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" if module == "regrow" else module for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("regrow.")}
    return found


def test_imports_point_downwards():
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        wrong = imported(path) - MAY_KNOW[part] - {part}
        assert not wrong, f"{path.relative_to(ROOT)} must not know {sorted(wrong)}"


def test_every_public_name_is_there():
    assert regrow.__all__ == ["Approximate", "Run", "Step", "init", "per_rank", "state_digest"]
    assert all(getattr(regrow, name) is not None for name in regrow.__all__)


def test_importing_starts_nothing():
    code = "import regrow, sys, threading; print('torch' in sys.modules, threading.active_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["False", "1"]


def test_the_readmes_script_runs_protected_and_plain(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "train.py"
    script.write_text(blocks[0])
    job = run_job(script=script, nproc=2)
    assert job.code == 0, job.output
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert alone.returncode == 0, alone.stderr
    assert alone.stderr.count("this run is not protected") == 1
