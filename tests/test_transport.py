"""Messages of a pipeline's rank, without the others: how long they are waited for, and what is known of journals."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from regrow.ids import Rank, Step
from regrow.journal import Journal
from regrow.run.transport import CATCHES_UP_WITHIN, Transport

GROUP = SimpleNamespace(group_name="world", timeout=timedelta(seconds=9))


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "spill", memory_bytes=1 << 20, segment_bytes=64 << 10)
    yield made
    made.close()


def transport(journal, rank, *positions):
    """Return one that goes on with others; messages that it wants are answered with how long it would wait."""
    courier = SimpleNamespace(receive=lambda peer, name, tensor, timeout: timeout)
    ranks = range(len(positions))
    made = Transport(
        Rank(rank), journal, courier, stages=ranks, domains=[f"rank {each}" for each in ranks], token="secret"
    )
    made._members["world"] = tuple(ranks)
    made.resume(1, [Step(position) for position in positions], [("127.0.0.1", 1)] * len(positions))
    return made


@pytest.mark.parametrize(
    ("positions", "peer", "timeout"),
    [
        ((8, 8, 4), 1, CATCHES_UP_WITHIN),  # which itself waits for rank 2
        ((8, 4, 8), 1, CATCHES_UP_WITHIN),
        ((8, 8, 8), 1, GROUP.timeout),
    ],
)
def test_a_message_may_take_as_long_as_a_replay_behind_its_sender(journal, positions, peer, timeout):
    waiting = transport(journal, 0, *positions)
    assert waiting.take(GROUP, "recv", ([torch.zeros(1)], peer, 0), {}) == timeout


def test_a_journal_that_is_written_anew_is_not_damaged_any_more(journal):
    found = transport(journal, 0, 8, 8, 8)
    found.damaged |= {(Rank(1), Step(3)), (Rank(1), Step(6)), (Rank(2), Step(6))}
    found.resume(2, [Step(4), Step(4), Step(8)], [("127.0.0.1", 1)] * 3)
    assert found.damaged == {(Rank(1), Step(3)), (Rank(2), Step(6))}
