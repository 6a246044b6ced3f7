"""The loader's worker processes: killed, stopped, orphaned, spawned."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import (
    get_worker_info,
)

from data_help import Noisy, Where, gone, same, take
from regrow.data import Loader


def test_workers_of_one_epoch_only_when_asked_for() -> None:
    loader = Loader(Where(), 4, rank=0, world_size=1, num_workers=1, persistent_workers=False)
    seen = []
    for _ in range(2):
        seen.append({int(pid) for batch in loader for pid in batch[:, 1]})
        assert loader.worker_pids == []
    assert [len(pids) for pids in seen] == [1, 1]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("swallow", [False, True])
def test_a_killed_worker_is_an_exception_and_the_next_call_goes_on(swallow: bool) -> None:
    whole = take(Loader(Noisy(), 2, rank=0, world_size=1), 20)
    loader = Loader(Noisy(), 2, rank=0, world_size=1, num_workers=2)
    got = take(loader, 3)
    pids = loader.worker_pids
    try:
        # torch's SIGCHLD handler raises wherever the main thread is: here, or in next_batch
        try:
            os.kill(pids[0], signal.SIGKILL)
            if swallow:
                gone(pids[:1])
        except RuntimeError:
            assert swallow or loader.state_dict()["batch"] == 3
        with pytest.raises(RuntimeError, match=r"[Ww]orker"):
            for _ in range(20):
                got.append(loader.next_batch())
        assert gone(pids)
        got += take(loader, 20 - len(got))
    finally:
        loader.close()
    assert same(got, whole)


class Stopping(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.tensor(index)


def test_a_stopped_worker_is_a_timeout_and_then_killed() -> None:
    loader = Loader(Stopping(), 2, shuffle=False, rank=0, world_size=1, num_workers=1, prefetch_factor=1, timeout=2)
    try:
        loader.next_batch()
        pids = loader.worker_pids
        with pytest.raises(RuntimeError, match="timed out"):
            loader.next_batch()
    finally:
        loader.close()
    assert gone(pids)


_RANK_WITH_WORKERS = """
import os, sys, time, torch
from regrow.data import Loader
forks = []
os.register_at_fork(before=lambda: forks.append(0), after_in_child=lambda: len(forks) == 2 and time.sleep(LATE))
class Data:
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i)
loader = Loader(Data(), 2, rank=0, world_size=1, num_workers=2)
loader.next_batch()
print(*loader.worker_pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG is Linux's")
@pytest.mark.parametrize("late_s", [0, 1])
def test_workers_die_with_a_killed_rank(late_s: int) -> None:
    """Also one that was forked before its rank was killed and begins to run only afterwards."""
    script = _RANK_WITH_WORKERS.replace("LATE", str(late_s))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    rank = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert rank.stdin is not None
    assert rank.stdout is not None
    pids: list[int] = []
    try:
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
        rank.kill()
        # torch's own watch looks every 5 s, and never ends a worker that it first looked at when its rank was gone
        assert gone(pids, within_s=late_s + 3)
    finally:
        rank.kill()
        rank.wait(timeout=20)
        rank.stdin.close()
        rank.stdout.close()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_sees_the_users_dataset(tmp_path: Path) -> None:
    class Needy(Noisy):
        path: Path | None = None

        def __getitem__(self, index: int) -> torch.Tensor:
            assert self.path is not None
            return torch.tensor(index)

    def open_it(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Needy)
        info.dataset.path = tmp_path / str(worker_id)

    loader = Loader(Needy(), 20, shuffle=False, rank=0, world_size=1, num_workers=1, worker_init_fn=open_it)
    try:
        assert loader.next_batch().tolist() == list(range(20))
    finally:
        loader.close()


def test_spawned_workers_read_the_same() -> None:
    expected = take(Loader(Noisy(), 8, rank=0, world_size=1), 3)
    loader = Loader(Noisy(), 8, rank=0, world_size=1, num_workers=1, multiprocessing_context="spawn")
    try:
        assert same(take(loader, 3), expected)
    finally:
        loader.close()
