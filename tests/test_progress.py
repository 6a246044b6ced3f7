"""What is said of checkpoints, and how often: a clock by hand."""

from __future__ import annotations

from regrow.ids import Step
from regrow.run.progress import Progress


def test_not_each_of_many():
    said: list[str] = []
    progress = Progress(said.append)
    for second in range(25):
        progress.committed(float(second), Step(second), 0.5, "every 2 steps")
    assert said == [f"checkpoint of step {step} committed in 0.50 s; every 2 steps" for step in (0, 11, 22)]


def test_one_that_takes_long():
    said: list[str] = []
    progress = Progress(said.append)
    progress.committed(0.0, Step(5), 1.0, "")
    for second in range(1, 200):
        progress.under_way(float(second), 10.0, Step(9), Step(5), "/ckpt")
    assert [text.partition(" s: ")[0] for text in said[1:]] == [
        "the checkpoint of step 9 is not complete after 60",
        "the checkpoint of step 9 is not complete after 120",
        "the checkpoint of step 9 is not complete after 180",
    ]
    assert said[1].endswith("/ckpt takes it slowly, here or on another rank; the newest is of step 5")
    progress.written(300.0, Step(9), 1000, 2000)
    assert said[-1] == "checkpoint of step 9: 1.00 kB of 2.00 kB written"


def test_others_keep_silent():
    progress = Progress(None)
    progress.committed(0.0, Step(1), 1.0, "")
    progress.written(100.0, Step(1), 1, 2)
    progress.under_way(100.0, 0.0, Step(1), None, "/ckpt")
