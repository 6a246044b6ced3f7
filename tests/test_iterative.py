"""Running checkpoints: what is saved, what comes back, and what is left of them when a process dies."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from regrow.iterative import ArrayBlocks, InUse, ParameterBlocks, RunningCheckpoint, read, restore
from regrow.iterative.storage import Storage

FILE = "running.blocks"


def descent(state, rates, target):
    """One iteration of gradient descent on a quadratic, in place."""
    state -= rates * (state - target)


class Problem:
    """Eight rows that converge, some faster than others."""

    def __init__(self, **options):
        self.target = np.arange(40.0).reshape(8, 5)
        self.state = np.zeros((8, 5))
        self.blocks = ArrayBlocks.rows(w=self.state)
        self.checkpoint = RunningCheckpoint(self.blocks, **options)
        self.iteration = 0

    def run(self, iterations, rates=0.2):
        saved = []
        for _ in range(iterations):
            self.iteration += 1
            descent(self.state, rates, self.target)
            saved.append(self.checkpoint.step(self.iteration))
        return saved


def test_the_rows_that_moved_farthest_are_saved():
    problem = Problem(every=8, fraction=1 / 4)
    assert problem.run(4) == [[], ["w[7]", "w[6]"], [], ["w[5]", "w[4]"]]
    assert problem.checkpoint.saved_at == {f"w[{row}]": age for row, age in enumerate([0, 0, 0, 0, 4, 4, 2, 2])}


def test_lost_rows_go_back_and_survivors_keep_theirs():
    problem = Problem(every=8, fraction=1 / 4)
    problem.run(2)
    after_two = problem.state.copy()
    problem.run(5)
    true = problem.state.copy()
    problem.state[[0, 6]] = np.nan
    recovery = problem.checkpoint.recover(["w[6]", "w[0]"])
    assert recovery.stale == {"w[0]": 7, "w[6]": 5}
    assert (problem.state[6] == after_two[6]).all()
    assert (problem.state[0] == 0).all()
    assert (problem.state[[1, 2, 3, 4, 5, 7]] == true[[1, 2, 3, 4, 5, 7]]).all()
    moved = float(np.linalg.norm(problem.state - true))
    assert moved <= recovery.norm <= 3 * moved  # blocks slow down: rather too large


def test_full_recovery_is_the_last_full_checkpoint():
    problem = Problem(every=4, fraction=1.0)
    problem.run(8)
    then = problem.state.copy()
    problem.run(3)
    recovery = problem.checkpoint.recover([], full=True)
    assert (problem.state == then).all()
    assert set(recovery.stale.values()) == {3}
    assert recovery.norm > 0


def test_a_checkpoint_in_memory_can_be_copied_with_its_blocks():
    """To try out a recovery: the copy has blocks and saved values of its own."""
    state = np.zeros(3)
    blocks = ArrayBlocks({"w": state})
    checkpoint = RunningCheckpoint(blocks, every=2, fraction=1.0)
    state += 5
    other_blocks, other = copy.deepcopy((blocks, checkpoint))
    other.recover(["w"])
    assert (other_blocks.get("w")[0] == 0).all()
    assert (state == 5).all()
    checkpoint.step(2)
    other_blocks.get("w")[0][...] = 7
    other.recover(["w"])
    assert (other_blocks.get("w")[0] == 0).all()


def test_what_was_put_back_counts_as_saved_now():
    problem = Problem(every=8, fraction=1 / 4)
    problem.run(7)
    problem.checkpoint.recover(["w[0]"])
    assert problem.checkpoint.recover(["w[0]"]).stale == {"w[0]": 0}


def test_the_predicted_cost_of_a_run_that_contracts():
    """All rows converge at one rate, so the bound holds, and it is not far off."""
    problem = Problem(every=8, fraction=1 / 4)
    problem.run(24, rates=0.1)
    undisturbed = problem.state.copy()
    recovery = problem.checkpoint.recover([f"w[{row}]" for row in range(4, 8)])
    cost, left = 0, np.linalg.norm(undisturbed - problem.target)
    while np.linalg.norm(problem.state - problem.target) > left:
        descent(problem.state, 0.1, problem.target)
        cost += 1
    assert recovery.cost.fit.c == pytest.approx(0.9, abs=0.03)
    assert recovery.cost.expected is not None
    assert cost - 1 <= recovery.cost.expected <= 4 * cost + 2
    if recovery.cost.bound is not None:
        assert recovery.cost.bound >= cost - 1
    assert "iterations more" in str(recovery)


def test_too_early_to_predict():
    problem = Problem(every=8)
    problem.run(2)
    assert "too few points" in str(problem.checkpoint.recover(["w[1]"]))


def test_every_priority_saves_and_recovers(tmp_path):
    for priority in ("distance", "relative", "round_robin", "random"):
        problem = Problem(every=8, fraction=1 / 8, priority=priority, directory=tmp_path / priority, seed=1)
        with problem.checkpoint:
            saved = problem.run(16)
            assert [len(names) for names in saved] == [1] * 16
            problem.checkpoint.flush()
        assert {name: each.iteration for name, each in read(tmp_path / priority).records.items()} == (
            problem.checkpoint.saved_at
        )


def test_tensors_of_any_type_travel_together(tmp_path):
    state = {
        "a": (torch.randn(3, 2), torch.randn(3, 2, dtype=torch.float64), torch.tensor(7)),
        "b": torch.arange(4, dtype=torch.bfloat16),
        "c": (np.arange(6, dtype=np.int32).reshape(2, 3), np.empty((0, 2), np.float16)),
    }
    blocks = ArrayBlocks(state)
    before = [
        array.clone() if isinstance(array, torch.Tensor) else array.copy() for n in state for array in blocks.get(n)
    ]
    with RunningCheckpoint(blocks, every=1, fraction=1.0, directory=tmp_path):
        pass
    for name in state:
        for array in blocks.get(name):
            array[...] = 0
    recovery = restore(blocks, tmp_path)
    assert recovery.missing == recovery.damaged == ()
    after = [array for name in state for array in blocks.get(name)]
    assert all(
        np.array_equal(
            np.asarray(a.float() if hasattr(a, "float") else a), np.asarray(b.float() if hasattr(b, "float") else b)
        )
        for a, b in zip(before, after, strict=True)
    )


def test_a_models_moments_travel_with_their_parameters(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    blocks = ParameterBlocks(model.named_parameters(), optimizer, pieces=2)
    assert list(blocks.names()) == [
        "0.weight[0:2]", "0.weight[2:5]", "0.bias[0:2]", "0.bias[2:5]", "1.weight", "1.bias"
    ]  # fmt: skip

    def train():
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()

    with RunningCheckpoint(blocks, every=2, fraction=1.0, directory=tmp_path) as checkpoint:
        for iteration in range(1, 4):  # the moments appear after the first record: it outgrows its place
            train()
            checkpoint.step(iteration)
            if iteration == 2:
                saved = [part.clone() for part in blocks.get("0.weight[2:5]")]
        kept = [part.clone() for part in blocks.get("0.weight[0:2]")]
        checkpoint.recover(["0.weight[2:5]"])
        checkpoint.flush()
    assert len(saved) == 3
    assert all(torch.equal(a, b) for a, b in zip(saved, blocks.get("0.weight[2:5]"), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, blocks.get("0.weight[0:2]"), strict=True))
    assert read(tmp_path).records["1.bias"].iteration == 2


def test_moments_that_were_not_there_yet_begin_at_zero():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    blocks = ParameterBlocks(model.named_parameters(), optimizer)
    checkpoint = RunningCheckpoint(blocks, every=100)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.recover(["weight"])
    assert [part.abs().sum().item() for part in blocks.get("weight")][1:] == [0, 0]


# what is on storage ---------------------------------------------------------------------------------------------------


def saved_twice(directory):
    """A checkpoint of which every block has two records, of iterations 1 and 2."""
    state = np.zeros((4, 100))
    with RunningCheckpoint(ArrayBlocks.rows(w=state), every=1, fraction=1.0, directory=directory) as checkpoint:
        for iteration in (1, 2):
            state += 1
            checkpoint.step(iteration)
        checkpoint.flush()
    return state


def damage(directory, value, which=-1):
    """Flip a byte in the record of a row that holds this value."""
    raw = bytearray((directory / FILE).read_bytes())
    pattern = np.full(100, value).tobytes()
    places, at = [], raw.find(pattern)
    while at >= 0:
        places.append(at)
        at = raw.find(pattern, at + len(pattern))
    raw[places[which] + 17] ^= 0x40
    (directory / FILE).write_bytes(raw)


def test_a_damaged_record_is_named_and_the_one_before_it_used(tmp_path):
    saved_twice(tmp_path)
    damage(tmp_path, 2.0)
    fresh = np.full((4, 100), -1.0)
    recovery = restore(ArrayBlocks.rows(w=fresh), tmp_path)
    assert [row[0] for row in fresh] == [2, 2, 2, 1]
    assert recovery.stale == {"w[0]": 0, "w[1]": 0, "w[2]": 0, "w[3]": 1}
    assert len(recovery.damaged) == 1
    assert "block 'w[3]' does not match its checksum: its value of iteration 1 is used" in recovery.damaged[0]


def test_a_block_without_any_whole_record_is_missing(tmp_path):
    saved_twice(tmp_path)
    damage(tmp_path, 2.0)
    damage(tmp_path, 1.0)
    fresh = np.full((4, 100), -1.0)
    recovery = restore(ArrayBlocks.rows(w=fresh), tmp_path)
    assert recovery.missing == ("w[3]",)
    assert [row[0] for row in fresh] == [2, 2, 2, -1]
    assert "not on storage: w[3]" in str(recovery)


def test_a_damaged_index_costs_nothing_but_time(tmp_path):
    saved_twice(tmp_path)
    raw = bytearray((tmp_path / FILE).read_bytes())
    raw[30] ^= 1
    (tmp_path / FILE).write_bytes(raw)
    found = read(tmp_path)
    assert {name: each.iteration for name, each in found.records.items()} == {f"w[{row}]": 2 for row in range(4)}
    assert "index" in found.damaged[0]


def test_a_file_cut_short_loses_only_what_was_cut(tmp_path):
    saved_twice(tmp_path)
    raw = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(raw[: len(raw) - 600])
    found = read(tmp_path)
    assert len(found.records) == 4
    assert not found.missing


def test_only_lost_blocks_are_restored(tmp_path):
    saved_twice(tmp_path)
    fresh = np.full((4, 100), -1.0)
    recovery = restore(ArrayBlocks.rows(w=fresh), tmp_path, lost=["w[1]"], iteration=5)
    assert [row[0] for row in fresh] == [-1, 2, -1, -1]
    assert recovery.stale == {"w[1]": 3}


def test_a_directory_is_not_overwritten_by_mistake(tmp_path):
    state = saved_twice(tmp_path)
    blocks = ArrayBlocks.rows(w=state)
    with pytest.raises(ValueError, match=r"take it with restore\(\)"):
        RunningCheckpoint(blocks, every=1, directory=tmp_path)
    restore(blocks, tmp_path)
    with RunningCheckpoint(blocks, every=1, directory=tmp_path, replace=True, iteration=2):
        pass
    assert {each.iteration for each in read(tmp_path).records.values()} == {2}


def test_storage_that_fails_does_not_stop_the_algorithm(tmp_path, monkeypatch):
    problem = Problem(every=2, fraction=1 / 2, directory=tmp_path)
    full = [True]
    write = Storage.write

    def refuse(storage, records):
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(storage, records)

    monkeypatch.setattr(Storage, "write", refuse)
    problem.run(1)
    with pytest.raises(OSError, match="No space left"):
        problem.checkpoint.flush()
    full[0] = False
    problem.run(1)  # owed blocks go with the next round
    problem.checkpoint.flush()
    assert problem.checkpoint.failure is None
    problem.checkpoint.close()
    assert {name: each.iteration for name, each in read(tmp_path).records.items()} == problem.checkpoint.saved_at


def test_all_blocks_may_be_written_in_the_background(tmp_path):
    """What could not be begun is said, and tried again with the next round: all blocks are owed then."""
    w = np.arange(12.0).reshape(6, 2)
    with RunningCheckpoint(
        ArrayBlocks.rows(w=w), every=1, fraction=1, directory=tmp_path / "a", at_once=False
    ) as first:
        first.flush()
        assert {*read(tmp_path / "a").records} == {f"w[{row}]" for row in range(6)}
    (tmp_path / "b").write_text("in the way")
    with RunningCheckpoint(
        ArrayBlocks.rows(w=w), every=6, fraction=1 / 6, directory=tmp_path / "b", at_once=False
    ) as run:
        with pytest.raises(OSError, match="6 blocks could not be written"):
            run.flush()
        (tmp_path / "b").unlink()
        w += 1
        assert len(run.step(1)) == 1
        run.flush()
        assert run.failure is None and len(read(tmp_path / "b").records) == 6


def test_the_thread_is_named_and_closed(tmp_path):
    checkpoint = RunningCheckpoint(ArrayBlocks({"a": np.zeros(3)}), every=1, directory=tmp_path)
    assert "regrow-running-checkpoint" in [thread.name for thread in threading.enumerate()]
    checkpoint.close()
    assert "regrow-running-checkpoint" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ({}, {}, "no blocks"),
        ({"a": np.zeros(2)}, {"priority": "loudest"}, "give one of distance, relative"),
        ({"a": np.array([object()])}, {}, "plain numbers"),
        ({"a": "text"}, {}, "numpy arrays or torch tensors"),
    ],
)
def test_what_cannot_be_is_explained(blocks, options, message):
    with pytest.raises(ValueError, match=message):
        RunningCheckpoint(ArrayBlocks(blocks), every=1, **options)


def test_unknown_blocks_are_refused():
    problem = Problem(every=2)
    with pytest.raises(ValueError, match=r"no block 'w\[99\]'"):
        problem.checkpoint.recover(["w[99]"])


# processes that are killed --------------------------------------------------------------------------------------------

WRITER = """
import sys
import numpy as np
from regrow.iterative import ArrayBlocks, RunningCheckpoint

state = np.zeros((12, 20_000))
checkpoint = RunningCheckpoint(ArrayBlocks.rows(w=state), every=4, fraction=1 / 4, directory=sys.argv[1])
for iteration in range(1, 100_000):
    state += 1  # each row says after which iteration it was saved
    checkpoint.step(iteration)
    if iteration % 3 == 0:
        checkpoint.flush()
        print(iteration, *checkpoint.saved_at.values(), flush=True)
"""


def started(directory):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)


def test_a_process_killed_at_any_moment_leaves_every_block_whole(tmp_path):
    dice = random.Random(5)
    for number in range(8):
        directory = tmp_path / str(number)
        process = started(directory)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(dice.uniform(0.0, 0.1))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            told, _ = process.communicate(timeout=30)
        flushed = (
            [int(word) for word in told.splitlines()[-1].split()[1:]] if told.endswith("\n") and told else [0] * 12
        )
        fresh = np.full((12, 20_000), -1.0)
        recovery = restore(ArrayBlocks.rows(w=fresh), directory)
        assert recovery.missing == ()
        found = read(directory).records
        for row in range(12):
            iteration = found[f"w[{row}]"].iteration
            assert (fresh[row] == iteration).all()
            assert iteration >= flushed[row]


def test_two_processes_do_not_share_a_directory_and_a_dead_one_leaves_it(tmp_path):
    process = started(tmp_path)
    blocks = ArrayBlocks({"a": np.zeros(3)})
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(InUse, match="give each its own"):
            RunningCheckpoint(blocks, every=1, directory=tmp_path, replace=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    RunningCheckpoint(blocks, every=1, directory=tmp_path, replace=True).close()
