"""What is kept of an answer's parts: all of their bytes, in little room."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import either

from tureen.recordings.delta_log import GROUP, PartLog, Reader, difference, num_common

PARTS = st.lists(st.binary(max_size=40) | st.text("ab", max_size=40).map(str.encode), max_size=30)


def _track(parts, max_bytes=1 << 20) -> PartLog:
    track = PartLog(max_bytes)
    for part in parts:
        track.append(part)
    return track


def _read(track: PartLog, number: int) -> list[bytes]:
    reader = Reader(track, number)
    found = []
    while not reader.is_at_end:
        found.append(reader.next())
    return found


def _cumulative(num_events: int, num_outputs: int = 1) -> list[bytes]:
    rng = random.Random(1)
    texts, ids = [""] * num_outputs, [[] for _ in range(num_outputs)]
    events = []
    for at in range(num_events):
        index = at % num_outputs
        texts[index] += f"w{rng.randrange(10**5)} "
        ids[index].append(rng.randrange(50_000))
        meta = {"id": f"r_{index}", "completion_tokens": len(ids[index]), "logprobs": [-one / 7 for one in ids[index]]}
        body = {"text": texts[index], "output_ids": ids[index], "meta_info": meta, "index": index}
        events.append(b"data: " + json.dumps(body).encode() + b"\n\n")
    return events


@given(PARTS)
def test_every_part_is_read_back_from_wherever_one_begins(parts):
    track = _track(parts)
    for number in range(len(parts) + 1):
        assert _read(track, number) == parts[number:]


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 300), st.binary(max_size=50))
def test_a_part_is_its_slices_of_another_and_bytes_of_its_own(new, old, at, inserted):
    for one in (new, old[:at] + inserted + old[at:], old[:at] + old[at + 5 :]):
        pieces = difference(one, old)
        assert b"".join(piece if isinstance(piece, bytes) else old[slice(*piece)] for piece in pieces) == one


@pytest.mark.parametrize("num_outputs", [1, 3, 20])
def test_cumulative_events_are_read_back_across_groups(num_outputs):
    events = _cumulative(2 * GROUP + 7, num_outputs)
    track = _track(events, 100 << 20)
    for number in (0, 1, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, len(events) - 1, len(events)):
        assert _read(track, number) == events[number:]


def test_a_reader_hears_of_parts_that_come_later():
    track, events = PartLog(1 << 20), _cumulative(GROUP + 20)
    reader, found = Reader(track, 0), []
    for at, event in enumerate(events):
        track.append(event)
        while at % 3 == 0 and not reader.is_at_end:
            found.append(reader.next())
    while not reader.is_at_end:
        found.append(reader.next())
    assert found == events


@pytest.mark.parametrize(("num_outputs", "factor"), [(1, 40), (8, 5), (40, 2)])
def test_what_is_kept_of_cumulative_events_grows_with_the_text_and_not_with_its_square(num_outputs, factor):
    events = _cumulative(1500, num_outputs)
    track = _track(events, 1 << 30)
    assert track.num_bytes < sum(map(len, events)) / factor


def test_the_oldest_parts_are_dropped_where_there_are_too_many():
    rng = random.Random(2)
    parts = [rng.randbytes(1000) for _ in range(20 * GROUP)]
    track = PartLog(1 << 20)
    for part in parts:
        track.append(part)
        assert track.num_bytes <= 1 << 20
    assert track.start > 0
    assert _read(track, track.start) == parts[track.start :]


def test_a_reader_that_is_too_slow_is_told_so():
    track = PartLog(10_000)
    track.append(b"first")
    reader = Reader(track, 0)
    for at in range(3 * GROUP):
        track.append(random.Random(at).randbytes(200))
    assert reader.is_late


@pytest.mark.sampled
@pytest.mark.parametrize("num_outputs", [1, either(16, 6)])
def test_long_events_of_many_outputs_stay_within_the_bound_and_the_newest_can_be_read(num_outputs):
    """20 logprobs a token: each event has 1 KB for every token so far."""
    track, max_bytes, lists = PartLog(1 << 20), 1 << 20, [[] for _ in range(num_outputs)]
    for at in range(150 * num_outputs):
        index = at % num_outputs
        lists[index].append([[-float(at * 31 % 97 + top), top * at % 50_000, None] for top in range(20)])
        part = json.dumps({"text": "w " * at, "top": lists[index], "index": index}).encode() + b"\n\n"
        track.append(part)
        assert track.num_bytes <= max_bytes
        assert sum(map(len, track._recent.values())) == track._recent_bytes
    assert 0 <= track.start < track.end
    assert _read(track, track.end - 1) == [part]
    if num_outputs == 1:
        assert track.start == 0


def test_a_part_larger_than_the_bound_is_kept_alone():
    track = PartLog(1000)
    for at in range(5):
        track.append(random.Random(at).randbytes(5000))
        assert (track.start, track.end) == (at, at + 1)
    assert _read(track, 4) == [random.Random(4).randbytes(5000)]


def test_a_bound_that_becomes_smaller_holds_from_then_on():
    track = _track([random.Random(at).randbytes(100) for at in range(1000)])
    track.limit(10_000)
    for at in range(GROUP):
        track.append(random.Random(at).randbytes(100))
    assert track.num_bytes <= 10_000
    assert _read(track, track.start)[-1] == random.Random(GROUP - 1).randbytes(100)


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300))
def test_what_two_have_in_common_is_counted_to_the_byte(one, other, at, there):
    other = one[: len(one) // 2] + other
    want = 0
    while one[at + want : at + want + 1] == other[there + want : there + want + 1] != b"":
        want += 1
    assert num_common(one, at, other, there) == want
