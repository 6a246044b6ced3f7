"""A short rain of kills at random moments; ``make chaos`` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent.parent / "bench" / "chaos.py"


@pytest.mark.timeout(400)
def test_random_kills_change_nothing():
    command = [sys.executable, str(CHAOS), "--kills", "8", "--workers", "3", "--spares", "2", "--steps", "160"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=360)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its jobs
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "no hang, every result identical" in output
