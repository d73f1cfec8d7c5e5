"""Pictures in the engine: each encoded once, between steps, in its place in every row; whoever fails, fails alone."""

import struct

import msgspec
import pytest
from world import VOCAB_SIZE, CheckedRunner, World, embedding, make_request, with_media

from tureen.contract.runner import Capacity
from tureen.contract.types import NO_TOKEN, LogprobSpec
from tureen.engine import encoders
from tureen.engine.encoders import Encoders
from tureen.engine.queue import Schedule
from tureen.errors import Unavailable
from tureen.grammar.base import GrammarSpec
from tureen.runner.fake import FakeRunner

CAT, DOG, HEN = ("1" * 64, "2" * 64, "3" * 64)
TEXT = tuple(range(1, 30))


def _make_picture(name="p", digest=CAT, *, at=5, length=6, prompt=TEXT, **options):
    return with_media(make_request(name, prompt, **{"ignore_eos": True, **options}), (at, length, digest))


class Watched(World):
    """Notes which items are encoded; `script(item)` replaces how."""

    def __init__(self, *, script=None, **options):
        super().__init__(**options)
        self.encoded = []
        encode = self.runner.encode

        def watch(item):
            self.encoded.append(item.digest)
            return (script or encode)(item) if script is None or item.digest == DOG else encode(item)

        self.runner.encode = watch

    def run(self, *requests):
        for request in requests:
            self.add(request)
        self.drain()
        self.check_answers()


# ---- the right embeddings in the right rows


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("token_budget", [1, 2, 3, 5, 7, 64])
@pytest.mark.parametrize("places", [[(0, 3)], [(26, 3)], [(0, 29)], [(4, 5), (9, 1), (11, 8)], [(1, 1)]])
def test_embeddings_reach_their_rows_in_chunks_of_any_size(page_size, token_budget, places):
    world = World(page_size=page_size, num_pages=64 // page_size * 2, token_budget=token_budget)
    pictures = [(start, length, digest) for (start, length), digest in zip(places, (CAT, DOG, HEN), strict=False)]
    rows = []
    run = world.runner.run

    def record(batch, masks):
        rows.extend(batch.rows)
        return run(batch, masks)

    world.runner.run = record
    world.add(with_media(make_request("p", TEXT, ignore_eos=True), *pictures))
    world.drain()
    world.check_answers()
    wanted = {start + i: embedding(digest, i) for start, length, digest in pictures for i in range(length)}
    got = {}
    for row in rows:
        assert min(row.token_ids) >= NO_TOKEN
        empty = [row.start + i for i, token in enumerate(row.token_ids) if token == NO_TOKEN]
        assert len(row.embeds) == 4 * len(empty)
        got.update({position: row.embeds[4 * i : 4 * i + 4] for i, position in enumerate(empty)})
    assert got == wanted


@pytest.mark.parametrize("token_budget", [1, 3, 64])
def test_text_between_the_parts_of_a_picture_takes_none_of_its_embeddings(token_budget):
    world = Watched(token_budget=token_budget)
    request = with_media(make_request("p", TEXT, ignore_eos=True), (2, 4, CAT), (9, 3, CAT), (20, 5, CAT))
    before = [0, 4, 7]
    media = [
        msgspec.structs.replace(
            item, rows_before=rows, rows_after=12 - rows - item.num_tokens, pixels=b"" if rows else b"p"
        )
        for item, rows in zip(request.media, before, strict=True)
    ]
    world.run(msgspec.structs.replace(request, media=tuple(media)))
    assert world.encoded == [CAT]


def test_the_same_picture_twice_in_a_prompt_stands_in_both_places():
    world = Watched()
    world.run(with_media(make_request("p", TEXT, ignore_eos=True), (2, 4, CAT), (9, 4, CAT)))
    assert world.encoded == [CAT]


@pytest.mark.parametrize("max_new_tokens", [0, 1])
def test_a_prompt_that_is_but_a_picture_is_answered(max_new_tokens):
    world = World()
    world.add(with_media(make_request("p", TEXT, max_new_tokens=max_new_tokens, ignore_eos=True), (0, 29, CAT)))
    world.drain()
    world.check_answers()
    assert world.answers["p"].usage.prompt_tokens == 29


def test_log_probabilities_and_hidden_states_come_with_pictures_too():
    world = World(token_budget=3)
    request = _make_picture(logprobs=LogprobSpec(prompt_start=11))
    world.add(msgspec.structs.replace(request, hidden_states="all"))
    world.drain()
    world.check_answers()
    assert len(world.answers["p"].hidden_states) == len(TEXT) + 3


def test_the_sampler_hears_no_digest():
    world = World()
    world.add(_make_picture())
    states = []
    run = world.runner.run

    def record(batch, masks):
        states.extend(batch.new_slots)
        return run(batch, masks)

    world.runner.run = record
    world.drain()
    assert [state.prompt_ids for state in states] == [TEXT[:5] + (NO_TOKEN,) * 6 + TEXT[11:]]


# ---- once


def test_samples_later_requests_and_others_at_once_share_one_encoding():
    world = Watched()
    world.run(*(_make_picture(f"n{i}", seed=i) for i in range(4)), _make_picture("elsewhere", at=0))
    world.run(_make_picture("later"))
    assert world.encoded == [CAT]
    stats = world.engine.stats()
    assert (stats.total_pictures, stats.total_pictures_encoded) == (6, 1)


def test_who_has_all_embeddings_already_does_not_wait_for_those_who_have_not():
    world = Watched(script=lambda item: iter([None] * 10_000))
    world.run(_make_picture("first"))
    world.add(_make_picture("endless", DOG))
    world.step()
    world.add(_make_picture("again"))
    for _ in range(20):
        world.step()
    assert world.answers["again"].finish.type == "length"
    world.engine.abort("endless")
    world.drain()


def test_a_picture_that_another_client_sent_is_encoded_anew():
    world = Watched()
    world.run(_make_picture("one", cache_salt="one\n"), _make_picture("two", cache_salt="two\n"))
    world.run(_make_picture("again", cache_salt="two\n"))
    assert world.encoded == [CAT, CAT]


def test_a_flush_forgets_embeddings():
    world = Watched()
    world.run(_make_picture("one"))
    world.engine.call("flush_cache")
    world.run(_make_picture("two"))
    assert world.encoded == [CAT, CAT]


def test_what_is_kept_is_bounded_and_the_longest_unused_goes_first(monkeypatch):
    monkeypatch.setattr(encoders, "KEPT_BYTES", 2 * 6 * 4)
    world = Watched()
    for name, digest in enumerate([CAT, DOG, CAT, HEN, CAT, DOG]):
        world.run(_make_picture(str(name), digest))
        assert (
            world.engine.preparing.encoders._kept_bytes
            == sum(map(len, world.engine.preparing.encoders._kept.values()))
            <= 48
        )
    assert world.encoded == [CAT, DOG, HEN, DOG]


def test_a_prompt_whose_pictures_do_not_fit_what_is_kept_is_answered(monkeypatch):
    monkeypatch.setattr(encoders, "KEPT_BYTES", 1)
    world = Watched()
    world.run(with_media(make_request("p", TEXT), (1, 4, CAT), (6, 4, DOG), (12, 4, CAT), (20, 4, HEN)))
    assert world.encoded == [CAT, DOG, CAT, HEN]


def test_pixels_go_when_they_are_encoded_and_when_their_request_ends():
    world = Watched(max_rows=1)
    world.add(_make_picture("one"))
    world.add(_make_picture("two", DOG))
    world.step()
    sequences = world.engine._sequences
    assert all(item.pixels for one in sequences.values() for item in one.request.media)
    world.engine.abort("two")
    for _ in range(7):
        world.step()
    [one] = sequences.values()
    assert not any(item.pixels for item in (*one.request.media, *one.embedded.media))
    world.drain()


def test_too_many_pixels_at_once_are_unavailable_until_some_have_gone(monkeypatch):
    monkeypatch.setattr(encoders, "MAX_PIXEL_BYTES", 12)
    world = World()
    world.add(_make_picture("one"))
    world.add(_make_picture("same"))
    world.add(_make_picture("two", DOG))
    with pytest.raises(Unavailable) as error:
        world.engine.add(_make_picture("three", HEN))
    assert (error.value.status, error.value.code) == (503, "media_queue_full")
    world.add(make_request("text"))
    world.drain()
    world.add(_make_picture("three", HEN))
    world.drain()
    world.check_answers()


def test_embeddings_of_all_requests_are_bounded_until_some_have_ended(monkeypatch):
    monkeypatch.setattr(encoders, "MAX_EMBEDDING_BYTES", 4 * 12)
    world = World()
    world.add(_make_picture("one"))
    world.add(_make_picture("same"))
    world.add(_make_picture("two", DOG))
    for name, digest, salt in (("three", HEN, ""), ("another's", CAT, "salt")):
        with pytest.raises(Unavailable) as error:
            world.engine.add(_make_picture(name, digest, cache_salt=salt))
        assert (error.value.status, error.value.code) == (503, "media_queue_full")
    world.drain()
    world.add(_make_picture("three", HEN))
    world.drain()
    world.check_answers()


def test_the_first_request_is_refused_too_where_its_pictures_alone_are_too_many(monkeypatch):
    monkeypatch.setattr(encoders, "MAX_PIXEL_BYTES", 11)
    with pytest.raises(Unavailable):
        World().engine.add(with_media(make_request("one", TEXT), (1, 4, CAT), (6, 4, DOG)))


def test_requests_that_show_the_same_picture_hold_its_pixels_once():
    world = World()
    for name in ("one", "two", "three"):
        request = _make_picture(name)
        [item] = request.media
        copied = msgspec.structs.replace(item, pixels=bytes(bytearray(item.pixels)))
        world.engine.add(msgspec.structs.replace(request, media=(copied,)))
        if name == "two":
            world.engine.abort("one")
    held = [one.request.media[0].pixels for one in world.engine._sequences.values()]
    held += [one.embedded.media[0].pixels for one in world.engine._sequences.values()]
    assert held == [b"pixels"] * 4
    assert len(set(map(id, held))) == 1


def test_nothing_is_encoded_while_much_waits_for_a_place(monkeypatch):
    world = Watched(max_rows=1, num_pages=64)
    world.add(make_request("long", max_new_tokens=60, ignore_eos=True))
    world.step()
    monkeypatch.setattr(encoders, "KEPT_BYTES", 30)
    world.add(_make_picture("one"))
    world.add(_make_picture("two", DOG))
    world.add(_make_picture("three", HEN))
    monkeypatch.setattr(world.engine.preparing.encoders, "_clock", _clock_of(1.0))
    for _ in range(30):
        world.step()
    assert world.encoded == [CAT, DOG]  # 24 bytes and 24 bytes; then it waits
    world.drain()
    world.check_answers()


def test_pictures_of_what_runs_when_idle_are_encoded_when_nobody_else_runs(monkeypatch):
    world = Watched(num_pages=64)
    world.add(make_request("other", max_new_tokens=20, ignore_eos=True))
    world.step()
    world.add(msgspec.structs.replace(_make_picture("idle"), when_idle=True))
    monkeypatch.setattr(world.engine.preparing.encoders, "_clock", _clock_of(1.0))
    while world.ended == []:
        assert world.encoded == []
        world.step()
    world.drain()
    assert world.encoded == [CAT]
    world.check_answers()


def _clock_of(step_s):
    now = [0.0]

    def clock():
        now[0] += step_s
        return now[0]

    return clock


# ---- the prefix cache


def test_the_same_picture_and_text_are_found_in_the_prefix_cache_and_another_picture_is_not():
    world = World(page_size=4)
    for name, digest in (("one", CAT), ("same", CAT), ("other", DOG)):
        world.add(_make_picture(name, digest))
        world.drain()
    cached = {name: answer.usage.cached_tokens for name, answer in world.answers.items()}
    assert cached == {"one": 0, "same": 28, "other": 4}
    world.check_answers()
    assert world.answers["one"].token_ids == world.answers["same"].token_ids != world.answers["other"].token_ids


def test_a_preempted_request_resumes_with_its_picture_and_encodes_nothing_anew():
    world = Watched(num_pages=20, page_size=4, prefix_cache=False)
    world.run(*(_make_picture(f"p{i}", seed=i, max_new_tokens=17, at=3 + i) for i in range(3)))
    assert world.engine.stats().total_preemptions > 0
    assert world.encoded == [CAT]


# ---- abort, deadline, pause


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6, 7, 9])
def test_an_abort_at_any_time_leaves_nothing_behind_and_harms_no_other(num_steps):
    world = Watched()
    world.add(_make_picture("gone"))
    world.add(_make_picture("successor"))
    world.add(_make_picture("other", DOG))
    for _ in range(num_steps):
        world.step()
    world.engine.abort("gone", "deadline")
    world.drain()
    assert world.answers["gone"].finish.reason == "deadline"
    world.check_answers()
    assert world.encoded.count(CAT) == 1  # what was begun for one goes on for the other


def test_an_abort_while_it_is_encoded_ends_the_encoding():
    closed = []

    def endless(item):
        try:
            while True:
                yield None
        finally:
            closed.append(item.digest)

    world = Watched(script=endless)
    world.add(_make_picture("gone", DOG))
    world.step()
    world.engine.abort("gone")
    assert closed == [DOG]
    world.drain()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("num_steps", [0, 3, 8])
def test_a_pause_stops_encoding_and_a_resume_goes_on(mode, num_steps):
    world = Watched(script=_count_pieces(pieces := []))
    world.add(_make_picture("p", DOG))
    for _ in range(num_steps):
        world.step()
    world.engine.control.pause(mode)
    before = len(pieces)
    for _ in range(3):
        world.step()
    assert len(pieces) == before
    world.engine.control.resume()
    world.drain()
    world.check_answers()
    assert (world.answers["p"].finish.type == "abort") == (mode == "abort")


def _count_pieces(pieces):
    def encode(item):
        for piece in FakeRunner(Capacity(1, 1, 1, VOCAB_SIZE, 1)).encode(item):
            pieces.append(piece)
            yield piece

    return encode


# ---- faults


def _raises_at_once(item):
    raise RuntimeError("broken at once")


def _raises_later(item):
    yield None
    raise RuntimeError("broken later")


def _ends_early(item):
    yield None


def _not_a_number(item):
    yield struct.pack(f"<{item.num_tokens}f", *[1.0] * (item.num_tokens - 1), float("nan"))


def _infinite(item):
    yield struct.pack(f"<{item.num_tokens}f", *[float("inf")] * item.num_tokens)


def _endless(item):
    while True:
        yield None


FAULTS = [_raises_at_once, _raises_later, _ends_early, _not_a_number, _infinite, _endless]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("has_company", [False, True])
def test_an_encoder_that_fails_fails_one_request(fault, has_company, monkeypatch):
    monkeypatch.setattr(encoders, "MAX_ENCODE_S", 50.0)
    world = Watched(script=fault)
    monkeypatch.setattr(world.engine.preparing.encoders, "_clock", _clock_of(1.0))
    if has_company:
        world.add(make_request("text", max_new_tokens=20, ignore_eos=True))
    world.add(_make_picture("bad", DOG))
    world.add(_make_picture("good"))
    world.drain(200_000)
    finish = world.answers["bad"].finish
    assert (finish.type, finish.status, finish.code) == ("error", 500, "request_failed")
    assert "could not be encoded" in finish.message
    world.add(_make_picture("bad again", DOG))
    world.drain(200_000)
    assert world.answers["bad again"].finish.type == "error"  # nothing of it was kept
    for name in world.answers:
        world.check_answer(name, may_fail=name.startswith("bad"))


# ---- time


class Timed:
    """An encoder and steps that take time by a clock of their own."""

    def __init__(self, piece_s, step_s):
        self.now = self.encoding_s = self.stepping_s = 0.0
        self.piece_s, self.step_s = piece_s, step_s
        self.encoders = Encoders(self, lambda sequence: (sequence.terms.number,), lambda: self.now)
        world = World()
        world.engine.add(_make_picture(length=20))
        [self.sequence] = world.engine._sequences.values()
        self.encoders.add(self.sequence)

    def encode(self, item):
        for _ in range(100):
            self._spend(self.piece_s)
            yield None
        yield bytes(80)

    def _spend(self, seconds):
        self.now += seconds
        self.encoding_s += seconds

    def step(self):
        self.encoders.begin_step()
        self.now += self.step_s
        self.stepping_s += self.step_s
        return self.encoders.advance([], after_step=True)


@pytest.mark.parametrize(("piece_s", "step_s"), [(0.005, 0.05), (0.005, 0.005), (0.05, 0.004), (0.001, 1.0)])
def test_beside_steps_encoding_takes_at_most_its_share_of_their_time(piece_s, step_s):
    timed = Timed(piece_s, step_s)
    ready = []
    while not ready:
        ready = timed.step()
        assert timed.encoding_s <= encoders.SHARE * timed.stepping_s + piece_s + 1e-9
    assert ready[0].sequence is timed.sequence
    assert timed.encoding_s == pytest.approx(100 * piece_s)
    assert encoders.SHARE * timed.stepping_s <= timed.encoding_s + max(step_s, piece_s)  # and it takes its share


def test_an_idle_engine_encodes_all_the_time_and_owes_nothing_for_it():
    timed = Timed(0.005, 0.005)
    for _ in range(50):
        assert timed.encoders.advance([], after_step=False) == []
    assert timed.now == timed.encoding_s == pytest.approx(0.25)
    timed.step()
    assert timed.encoding_s > 0.25


def test_steps_run_between_the_pieces_of_a_picture():
    world = World()
    monotonous = _clock_of(1.0)
    world.engine.preparing.encoders._clock = monotonous
    world.add(make_request("text", max_new_tokens=50, ignore_eos=True))
    world.step()
    world.add(_make_picture("p", length=20))
    num_before = len(world.answers["text"].token_ids)
    while world.engine.preparing.encoders.waiting:
        world.step()
    assert len(world.answers["text"].token_ids) - num_before >= 10
    world.drain()
    world.check_answers()


def test_the_higher_priority_is_encoded_first_but_what_is_begun_is_finished():
    world = Watched(schedule=Schedule(by_priority=True))
    world.add(_make_picture("low", CAT, priority=0))
    world.step()
    world.add(_make_picture("middle", HEN, priority=1))
    world.add(_make_picture("high", DOG, priority=2))
    world.drain()
    world.check_answers()
    assert world.encoded == [CAT, DOG, HEN]


# ---- together with others


def test_a_grammar_and_a_picture_wait_for_each_other():
    world = Watched()
    request = msgspec.structs.replace(
        _make_picture(max_new_tokens=12), grammar=GrammarSpec("regex", "g7 12"), grammar_field="regex"
    )
    world.run(request)
    assert world.encoded == [CAT]


def test_requests_that_wait_for_pictures_count_as_waiting():
    world = World(max_rows=1, max_queued=2)
    world.add(_make_picture("a"))
    world.add(_make_picture("b", DOG))
    world.add(_make_picture("c", HEN))
    assert world.engine.stats().num_queued == 3
    with pytest.raises(Unavailable):
        world.engine.add(_make_picture("d"))
    world.drain()
    world.check_answers()


def test_the_fake_encoder_is_that_of_the_oracle():
    runner = CheckedRunner(Capacity(4, 4, 1, VOCAB_SIZE, 16))
    [item] = _make_picture(length=3).media
    *pieces, whole = runner.encode(item)
    assert pieces == [None] * 3
    assert whole == b"".join(embedding(CAT, index) for index in range(3))
