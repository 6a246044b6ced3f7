"""Workers that are forked from a template are what the interpreter would have made, and do not depend on it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agent_harness import Job

FACTS = Path(__file__).parent / "scripts" / "facts.py"
FORKED = ("--start-method", "forkserver")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def starter(*words, **options):
        jobs.append(Job(tmp_path, *FORKED, *words, **options))
        return jobs[-1]

    yield starter
    for job in jobs:
        job.kill()


def is_forked(pid):
    return any(word.endswith("template.py") for word in psutil.Process(pid).cmdline())


def template_of(job, number=0):
    return job.until(lambda: job.events("template_ready")[number:], "a template")[0]["pid"]


def facts(method, tmp_path):
    out = tmp_path / method
    out.mkdir()
    command = [sys.executable, "-m", "regrow", "run", "--nproc-per-node", "2", "--start-method", method]
    command += ["--log-dir", str(tmp_path / f"logs-{method}"), str(FACTS), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = [json.loads(path.read_text().replace(str(out), "OUT")) for path in sorted(out.glob("facts*"))]
    assert len(found) == 2
    return found


def test_a_forked_worker_finds_what_a_started_one_does(tmp_path):
    forked, spawned = facts("forkserver", tmp_path), facts("spawn", tmp_path)
    for ours, theirs in zip(forked, spawned, strict=True):
        for name, value in theirs["same"].items():
            assert ours["same"][name] == value, name
    for name in forked[0]["own"]:
        assert forked[0]["own"][name] != forked[1]["own"][name], name


@pytest.mark.parametrize(
    "text",
    [
        "print(__name__, __file__); import sys; print(sys.argv)",
        "def f():\n    raise ValueError('of the script')\n\nf()\n",
        "import sys; sys.exit(3)",
        "raise SystemExit('a text')",
        "this is not Python",
        "import regrow_has_no_such_module",
        "import atexit, threading\natexit.register(print, 'at exit')\nthreading.Timer(0.1, print, ('timer',)).start()",
        "import os; os._exit(5)",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
        "def f():\n    try:\n        {}['a']\n    except KeyError:\n        raise RuntimeError('second')\nf()",
    ],
)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_script_ends_as_the_interpreter_would_end_it(tmp_path, text, module):
    (tmp_path / "script.py").write_text(text)
    words = ["-m", "script"] if module else ["script.py"]
    code = f"from regrow.agent import template; template.run_script({[words[-1], 'a', 'b']}, module={module})"
    results = []
    for command in ([*words, "a", "b"], ["-c", f"import sys; sys.path.pop(0); {code}"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        lines = done.stderr.splitlines()
        if module:  # there the interpreter leaves frames of its own in the traceback
            lines = [line for line in lines if "frozen runpy" not in line and "Traceback" not in line]
        results.append((done.returncode, done.stdout, lines))
    assert results[1] == results[0]


def test_workers_do_not_need_the_template_any_more(start):
    job = start("--nproc-per-node", "2", plan={"gate": True})
    template = template_of(job)
    first = [job.note("steps done", rank=rank)["pid"] for rank in (0, 1)]
    assert all(map(is_forked, first))
    assert all(psutil.Process(pid).ppid() == job.pid for pid in first)
    os.kill(template, signal.SIGKILL)
    job.until(lambda: job.events("template_lost"), "notice of the template's end")
    os.kill(first[1], signal.SIGKILL)
    second = job.note("resumed", rank=1, incarnation=1)["pid"]
    assert not is_forked(second)
    assert template_of(job, 1) != template
    os.kill(second, signal.SIGKILL)
    third = job.note("resumed", rank=1, incarnation=2)["pid"]
    assert is_forked(third)
    assert psutil.Process(first[0]).is_running()
    zombies = [child.pid for child in psutil.Process(job.pid).children() if child.status() == psutil.STATUS_ZOMBIE]
    assert zombies == []
    job.open_gate()
    assert job.wait() == 0, job.err
    job.assert_clean()


def test_a_template_that_does_not_answer_is_given_up(start):
    job = start("--nproc-per-node", "2", "--dead-after", "10", plan={"gate": True})
    template = template_of(job)
    for rank in (0, 1):
        job.note("steps done", rank=rank)
    os.kill(template, signal.SIGSTOP)
    os.kill(job.notes("steps done", rank=1)[0]["pid"], signal.SIGKILL)
    assert not is_forked(job.note("resumed", rank=1, incarnation=1)["pid"])
    assert [event["pid"] for event in job.events("template_unfit")] == [template]
    job.open_gate()
    assert job.wait() == 0, job.err
    job.assert_clean()


def test_a_template_with_threads_is_not_used(start, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (site / "sitecustomize.py").write_text(f"import sys, threading\nif 'template.py' in str(sys.orig_argv): {thread}\n")
    job = start("--nproc-per-node", "2", plan={}, env={"PYTHONPATH": str(site)})
    assert job.wait() == 0, job.err
    assert [event["why"] for event in job.events("template_unfit")] == ["importing torch started 1 threads"]
    assert job.events("template_ready") == []


def test_threads_that_know_of_forks_are_no_obstacle(start, monkeypatch):
    """A single worker may use all cores: numpy's library makes its threads when it is loaded."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    job = start("--nproc-per-node", "1", plan={})
    assert job.wait() == 0, job.err
    assert job.events("template_unfit") == []
    assert len(job.events("template_ready")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_agent_ends(start, number):
    job = start("--nproc-per-node", "2", "--spares", "1", plan={"gate": True})
    template = template_of(job)
    job.until(lambda: job.events("spare_ready"), "a spare")
    job.signal(number)
    assert job.wait() == (128 + number if number == signal.SIGTERM else -number)
    job.until(lambda: not job.living() and not psutil.pid_exists(template), "the end of all")


def test_the_end_can_come_while_the_template_loads(start):
    job = start("--nproc-per-node", "2", plan={"gate": True})
    job.until(lambda: job.logs.is_dir() and job.events("run_started"), "the start")
    children = psutil.Process(job.pid).children()
    job.signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert job.notes() == []
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_program_around_the_interpreter_is_started_for_every_worker(start, tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/said\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    job = start("--nproc-per-node", "2", env={"PYTHON_EXEC": str(wrapper)})
    assert job.wait() == 0, job.err
    assert [Path(line).name for line in (tmp_path / "said").read_text().split()] == 2 * ["agent_worker.py"]
    assert job.events("template_ready") == []
