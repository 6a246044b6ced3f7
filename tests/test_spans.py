"""Snapshots cut into chunks for the network's idle spans."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.spans import Frequency, Link, cut, every, remaining_s, share, typical

LINK = Link(bytes_s=100.0, latency_s=0.01, buffer_bytes=400, parts=4, share=0.5)


@given(
    spans=st.lists(st.floats(0, 20), max_size=8),
    state=st.integers(0, 3000),
    copies=st.integers(0, 3),
    share=st.floats(0.1, 1.0),
    latency=st.floats(0, 0.5),
)
def test_every_copy_goes_whole_in_order_and_no_span_is_overfull(spans, state, copies, share, latency):
    link = Link(bytes_s=100.0, latency_s=latency, buffer_bytes=400, parts=4, share=share)
    traffic = cut(spans, state, copies, link)
    sent = Counter()
    for chunk in traffic.chunks:
        assert 0 < chunk.nbytes <= 100
        sent[chunk.copy] += chunk.nbytes
    assert sent == Counter({copy: state for copy in range(copies) if state})
    assert [chunk.copy for chunk in traffic.chunks] == sorted(chunk.copy for chunk in traffic.chunks)
    used = Counter()
    for chunk in traffic.chunks:
        if chunk.span is not None:
            used[chunk.span] += link.time_s(chunk.nbytes)
    for span, seconds in used.items():
        assert seconds <= share * spans[span] + 1e-9
    late = [chunk for chunk in traffic.chunks if chunk.span is None]
    assert traffic.spill_s == pytest.approx(sum(link.time_s(chunk.nbytes) for chunk in late))


def test_what_fits_does_not_spill():
    traffic = cut([2.0, 4.0], 200, 1, LINK)
    assert traffic.spill_s == 0
    assert [(chunk.nbytes, chunk.span) for chunk in traffic.chunks] == [(99, 0), (100, 1), (1, 1)]


def test_what_does_not_fit_is_taken_less_often():
    assert cut([1.0], 100, 1, LINK).spill_s > 0
    assert every([1.0], 100, 1, LINK) == 3
    assert every([10.0], 100, 1, LINK) == 1
    assert every([], 100, 1, LINK, most=7) == 7


@given(
    spans=st.lists(st.floats(0, 3), max_size=5),
    state=st.integers(0, 800),
    copies=st.integers(0, 2),
    latency=st.floats(0, 0.2),
)
def test_it_is_the_least_number_of_iterations_that_do(spans, state, copies, latency):
    link = Link(bytes_s=100.0, latency_s=latency, buffer_bytes=400, parts=4, share=0.5)
    fitting = [k for k in range(1, 30) if cut([*spans] * k, state, copies, link).spill_s == 0]
    if any(link.fitting(0.5 * span) for span in spans):
        assert every(spans, state, copies, link, most=30) == (fitting[0] if fitting else 30)
    else:
        assert every(spans, state, copies, link, most=30) == 30


@pytest.mark.parametrize("wrong", [{"bytes_s": 0.0}, {"bytes_s": 1.0, "share": 1.5}, {"bytes_s": 1.0, "parts": 0}])
def test_no_such_network(wrong):
    with pytest.raises(ValueError, match="give a bandwidth above 0"):
        Link(**wrong)


def test_a_profile_is_made_of_iterations_that_are_alike():
    assert typical([]) is None
    assert typical([[1.0], [2.0]]) is None
    assert typical([[1.0, 5.0], [3.0, 6.0], [9.0], [2.0, 70.0]]) == (2.0, 6.0)
    assert typical([[1.0, 5.0]] * 9 + [[1.0]]) is None  # it may do something else from now on


def test_what_is_left_of_a_span():
    spans = (0.1, 1.0)
    assert remaining_s(1, 0.2, spans, 0.5) == pytest.approx(0.3)
    assert remaining_s(1, 0.7, spans, 0.5) == 0
    assert remaining_s(1, 2.1, spans, 0.5) == float("inf")  # it has never been so long
    assert remaining_s(2, 0.0, spans, 0.5) == float("inf")
    assert remaining_s(0, 0.0, None, 0.5) == float("inf")


@given(spans=st.lists(st.floats(0.001, 1), min_size=1, max_size=8), load=st.integers(0, 1000), start=st.floats(0, 0.01))
def test_no_more_of_each_span_is_used_than_is_needed(spans, load, start):
    link = Link(bytes_s=1000.0, share=0.8)
    used = share(spans, load, link, start_s=start)
    assert 0.2 <= used <= 0.8
    room = sum(max(used * span - start, 0.0) for span in spans)
    assert used == 0.8 or room * link.bytes_s >= load


def test_less_often_at_once_and_more_often_only_when_that_lasts():
    frequency = Frequency(patience=3)
    assert [frequency.propose(fitting) for fitting in (1, 4, 2, 2, 4, 2, 2, 2, 2, 5)] == [1, 4, 4, 4, 4, 4, 4, 2, 2, 5]
