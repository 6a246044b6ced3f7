"""Which checkpoints count, which may go, and what is said when storage does not tell."""

from __future__ import annotations

import pytest

from regrow.disk import marks
from regrow.disk.content import Where
from regrow.disk.marks import Mark, outdated
from regrow.disk.storage import Storage
from regrow.ids import Step
from regrow.run import finding
from regrow.run.finding import Finder


@pytest.fixture
def storage(tmp_path):
    return Storage.of(str(tmp_path))


def save(storage: Storage, *steps: int) -> None:
    """Leave a checkpoint of one rank, with nothing in it."""
    for step in steps:
        storage.make(marks.name_of(Step(step)))
        storage.write(marks.mark_of(Step(step), 0), Mark(Step(step), 0, 1, "a", (0,), {}, float(step)).dumps())


def names(*steps: int) -> list[str]:
    return [marks.name_of(Step(step)) for step in steps]


def test_the_last_ones_stay(storage):
    save(storage, 1, 2, 3)
    storage.make(f"{marks.name_of(Step(4))}.x.part")
    assert outdated(storage, 2) == [*names(1), f"{marks.name_of(Step(4))}.x.part"]


def test_damaged_ones_are_none_of_the_last(storage):
    save(storage, 12, 900, 1000)
    assert outdated(storage, 2, damaged={Step(900), Step(1000)}) == []
    save(storage, 24)
    assert outdated(storage, 1, damaged={Step(900), Step(1000)}) == names(12)


def test_what_the_run_has_begun_with_stays(storage):
    save(storage, 80, 90)
    assert outdated(storage, 1) == names(80)
    assert outdated(storage, 1, needed=Step(80)) == []


def finder(storage: Storage, monkeypatch: pytest.MonkeyPatch, others: list) -> Finder:
    monkeypatch.setattr(finding, "gather_json", lambda value: [value, *others])
    monkeypatch.setattr(finding, "_AGAIN_AFTER_S", 0.0)
    where = Where(rank=0, stage=None, replicas=(0,), together=(0,))
    return Finder(0, 2, storage, None, None, where, say=print, event=lambda *_, **__: None)


def test_storage_that_does_not_answer_is_not_taken_for_an_empty_one(storage, monkeypatch):
    save(storage, 10)
    one = finder(storage, monkeypatch, [{"steps": [10], "trouble": None}])
    answers = [OSError(5, "Input/output error")] * 3
    usable = marks.usable
    monkeypatch.setattr(marks, "usable", lambda at: fail(answers) if answers else usable(at))
    with pytest.raises(ValueError, match=r"rank 0 cannot see which checkpoints there are .*Input/output error.*again"):
        one.find(listens=False)
    answers += [OSError(5, "Input/output error")] * 2
    assert one._tried() == {"steps": [10], "trouble": None}, "it is asked again"
    with pytest.raises(ValueError, match="rank 1 cannot see"):
        finder(storage, monkeypatch, [{"steps": [], "trouble": "no"}]).find(listens=True)


def fail(answers: list) -> None:
    raise answers.pop()


def test_a_step_that_is_committed_again_counts_again(storage, monkeypatch):
    save(storage, 10)
    one = finder(storage, monkeypatch, [])
    one.damaged.add(Step(10))
    assert one.usable() == []
    one.committed(Step(10))
    assert one.usable() == [10]
