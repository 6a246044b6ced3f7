"""A schedule's first contact: who must make it again when somebody was lost in it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from regrow.errors import Unrecoverable
from regrow.ids import Step
from regrow.run.contact import Contact, to_be_made_again


def contact(record=None, *, at=0, fails=False):
    """Return a contact, its schedule, and what was kept."""
    kept, seen = [], []

    def initialize(*_):
        if fails:
            raise ConnectionError("a neighbour is gone")

    @contextlib.contextmanager
    def replaying(given):
        seen.append(given)
        yield

    fabric = SimpleNamespace(
        recording=lambda: contextlib.nullcontext(SimpleNamespace(bytes=lambda: b"shapes\nand votes")),
        replaying=replaying,
    )
    schedule = SimpleNamespace(
        _stage_forward_initialized=False, _stage_backward_initialized=False, _initialize_pp_stages=initialize
    )
    made = Contact(
        schedule, fabric, record=record, keep=kept.append, preserving=contextlib.nullcontext, now=lambda: Step(at)
    )
    return made, schedule, kept, seen


def make(schedule):
    schedule._initialize_pp_stages([], (), {}, None, False, False)


def test_the_step_of_a_contact_is_known_to_a_replacement():
    first, schedule, kept, _ = contact(at=40)
    assert (first.made, first.step) == (False, None)
    make(schedule)
    assert (first.made, first.step) == (True, 40)
    replacement, schedule, _, seen = contact(kept[0], at=50)
    assert (replacement.made, replacement.step) == (True, 40)
    make(schedule)
    assert seen == [b"shapes\nand votes"]
    assert (replacement.made, replacement.step) == (True, 40)


def test_the_step_of_a_contact_that_was_interrupted():
    first, schedule, kept, _ = contact(at=40, fails=True)
    with pytest.raises(ConnectionError):
        make(schedule)
    assert (first.made, first.step) == (False, 40) and not kept
    first.again()
    assert (first.made, first.step) == (False, None)


MADE, MAKING, NOTHING = (True, Step(40)), (False, Step(40)), (False, None)


@pytest.mark.parametrize(
    ("told", "positions", "again"),
    [
        ([MADE, MAKING, NOTHING], (40, 40, 40), True),  # a run that began at step 40, or a second schedule
        ([MADE, MAKING, NOTHING], (40, 40, 35), True),
        ([MADE, MADE, MADE], (41, 40, 35), False),
        ([MAKING, NOTHING, NOTHING], (41, 40, 35), False),
    ],
)
def test_all_make_it_again_if_some_have_not_made_it(told, positions, again):
    assert to_be_made_again(told, [Step(step) for step in positions]) is again


def test_who_has_gone_on_does_not_make_it_again():
    with pytest.raises(Unrecoverable, match="in its first contact"):
        to_be_made_again([MADE, MAKING, NOTHING], [Step(41), Step(40), Step(35)])
