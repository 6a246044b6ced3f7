"""Checkpoints in an object store: a server that speaks S3, on loopback, and whatever else fsspec reaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import harness
from regrow.disk import marks
from regrow.disk.storage import Storage
from test_disk import cut_power


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """A bucket at a server of its own; what reaches it is in the environment."""
    port = harness.free_port()
    address = f"http://127.0.0.1:{port}"
    with (tmp_path_factory.mktemp("s3") / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    names = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"{address}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def test_a_power_cut(s3, tmp_path):
    url, args = f"{s3}/cut", ("--steps", "16")
    expected = harness.undisturbed(*args, nproc=2)
    cut = {"nproc": 2, "script": harness.SCRIPT, "directory": url, "log_dir": tmp_path / "cut", "commits": 2}
    assert cut_power(*args, **cut) == -signal.SIGKILL
    left = marks.usable(Storage.of(url))
    assert left
    job = harness.run_job(*args, nproc=2, flags=("--ckpt-dir", url, "--ckpt-every", "2"))
    assert job.code == 0 and job.digests() == expected.digests(), job.output
    assert f"goes on at step {left[-1]}" in job.output, job.output
    assert marks.usable(Storage.of(url))[-1] == 16 and len(marks.find(Storage.of(url))) == 2
    command = [sys.executable, "-m", "regrow", "checkpoints", url]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0 and listed.stdout.count("complete, verified") == 2, listed


@harness.thorough
def test_one_that_is_damaged(s3):
    url, args = f"{s3}/damaged", ("--steps", "6")
    expected = harness.undisturbed(*args, nproc=2)
    flags = ("--ckpt-dir", url, "--ckpt-every", "3")
    assert harness.run_job(*args, nproc=2, flags=flags).code == 0
    storage = Storage.of(url)
    left = marks.usable(storage)
    assert left[-1] == 6 and len(left) == 2
    file = next(name for name in storage.names(marks.name_of(6)) if name.startswith("__1_"))
    raw = bytearray(storage.read(f"{marks.name_of(6)}/{file}"))
    raw[-2000] ^= 1
    storage.write(f"{marks.name_of(6)}/{file}", bytes(raw))
    job = harness.run_job(*args, nproc=2, flags=flags)
    assert job.code == 0 and job.digests() == expected.digests(), job.output
    assert f"{file} is damaged" in job.output and f"goes on at step {left[0]}" in job.output, job.output


def test_a_server_that_is_gone(s3, monkeypatch):
    """It is said before the first step, in a sentence."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{harness.free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    job = harness.run_job("--steps", "3", nproc=2, flags=("--ckpt-dir", f"{s3}/gone"))
    assert job.code == 1
    assert "cannot be written to" in job.output and "Traceback" not in job.output, job.output


def test_a_scheme_that_nobody_knows():
    with pytest.raises(ValueError, match=r"nowhere://x cannot be used for checkpoints"):
        Storage.of("nowhere://x")


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_what_every_storage_does(kind, tmp_path):
    """One contract: small files are there whole or not at all, names are those that are there, removing is thorough."""
    storage = Storage.of(str(tmp_path) if kind == "directory" else f"memory://{tmp_path.name}")
    assert storage.names() == []
    storage.make("a")
    storage.write("a/one", b"1")
    storage.write("a/one", b"2")
    with storage.writing("a/two") as file:
        file.write(b"two")
    assert storage.read("a/one") == b"2" and storage.names() == ["a"] and storage.names("a") == ["one", "two"]
    with storage.reading("a/two") as file:
        assert file.read() == b"two"
    with pytest.raises(OSError):
        storage.read("a/three")
    if storage.renames:
        storage.rename("a", "b")
        assert storage.names() == ["b"]
    storage.remove(storage.names()[0])
    storage.remove("never there")
    assert storage.names() == []
    assert not list(Path(tmp_path).iterdir())
