"""How deltas reach the reader of a stream: at once, in intervals, merged where it is slow."""

from __future__ import annotations

import asyncio
import random

import pytest
from fake_engine import make_request
from timeouts import until

from tureen.contract.types import FinishReason, OutputDelta, PositionLogprobs, StepReport, Usage
from tureen.errors import TureenError, Unavailable
from tureen.serving.coalescing import Gathering
from tureen.serving.streams import MERGE_AT, Streams

END = FinishReason(type="length", length=1)


def _make_deltas(count, *, tokens=1):
    """Deltas of one request that can be told apart, the last with its end."""
    deltas = []
    for index in range(count):
        ids = tuple(range(index * tokens, (index + 1) * tokens))
        deltas.append(
            OutputDelta(
                id="r",
                token_ids=ids,
                text=f"<{index}>",
                usage=Usage(5, (index + 1) * tokens, 0),
                output_logprobs=tuple(PositionLogprobs((-1.0, token_id)) for token_id in ids),
                prompt_logprobs=(PositionLogprobs((None, 9)),) if index == 0 else (),
                finish=END if index == count - 1 else None,
                hidden_states=(bytes([index % 256]),),
            )
        )
    return deltas


def _read(deltas, *, interval, pause=lambda index: True):
    """What a reader gets when it may run after those deltas for whose index `pause` is true."""

    async def scenario():
        streams = Streams()
        streams.open(lambda message: None)
        got = []

        async def read():
            got.extend([delta async for delta in streams.generate(make_request("r"), interval)])

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for index, delta in enumerate(deltas):
            streams.receive(StepReport((delta,)))
            if pause(index):
                for _ in range(5):
                    await asyncio.sleep(0)
        await reader
        return got

    return asyncio.run(scenario())


def _all_of(deltas, field):
    parts = [getattr(delta, field) for delta in deltas]
    return "".join(parts) if field == "text" else [one for part in parts for one in part]


def _check_same(got, deltas):
    for field in ("token_ids", "text", "output_logprobs", "prompt_logprobs", "hidden_states"):
        assert _all_of(got, field) == _all_of(deltas, field)
    assert [delta.finish for delta in got] == [None] * (len(got) - 1) + [END]
    for delta in got:
        assert delta.usage.output_tokens == delta.token_ids[-1] + 1


@pytest.mark.parametrize(
    ("interval", "sizes"),
    [(1, [1] * 10), (2, [1, 2, 2, 2, 2, 1]), (4, [1, 4, 4, 1]), (9, [1, 9]), (64, [1, 9])],
)
def test_the_first_delta_comes_at_once_then_as_many_tokens_as_asked_for_then_the_rest(interval, sizes):
    deltas = _make_deltas(10)
    got = _read(deltas, interval=interval)
    assert [len(delta.token_ids) for delta in got] == sizes
    _check_same(got, deltas)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_reader_gets_everything_once_and_in_order(seed):
    dice = random.Random(seed)
    deltas = _make_deltas(dice.choice([1, 2, MERGE_AT - 1, MERGE_AT, 3 * MERGE_AT + 5]), tokens=dice.choice([1, 3]))
    haste = dice.choice([0.0, 0.02, 0.5])
    _check_same(_read(deltas, interval=dice.choice([1, 7, 500]), pause=lambda index: dice.random() < haste), deltas)


def test_what_a_slow_reader_has_not_taken_is_few_pieces():
    async def scenario():
        streams = Streams()
        streams.open(lambda message: None)
        stream = streams.generate(make_request("r"))
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        for delta in _make_deltas(1000):
            streams.receive(StepReport((delta,)))
        assert len(streams._streams["r"]._pending) < MERGE_AT
        assert len((await reader).token_ids) == 1000
        await stream.aclose()

    asyncio.run(scenario())


def test_what_had_come_before_a_failure_is_read_first_whatever_the_interval():
    async def scenario():
        streams = Streams()
        streams.open(lambda message: None)
        got = []

        async def read():
            async for delta in streams.generate(make_request("r"), 64):
                got.extend(delta.token_ids)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for delta in _make_deltas(10)[:6]:
            streams.receive(StepReport((delta,)))
            await asyncio.sleep(0)
        streams.fail(lambda: Unavailable("it broke"))
        with pytest.raises(TureenError):
            await reader
        return got

    assert asyncio.run(scenario()) == [0, 1, 2, 3, 4, 5]


def test_a_busy_front_gathers_what_comes_in_for_one_event_and_the_first_and_the_last_come_at_once():
    deltas = _make_deltas(10)
    gathering = Gathering()
    gathering.judge(0.9)
    waiting = []
    gathering.put_off = waiting.append
    at_three = []

    def pause(index):
        if index == 3:
            at_three.append(len(waiting))
            while waiting:
                waiting.pop()()
        return True

    got = _read(deltas, interval=gathering, pause=pause)
    assert at_three == [1]  # however many tokens wait, one call
    assert [len(delta.token_ids) for delta in got] == [1, 3, 6]
    _check_same(got, deltas)


def test_a_front_that_is_not_busy_any_more_sends_each_token_also_where_a_call_was_put_off():
    deltas = _make_deltas(6)
    gathering = Gathering()
    gathering.judge(0.9)
    waiting = []
    gathering.put_off = waiting.append

    def pause(index):
        if index == 2:
            gathering.judge(0.1)
        if index == 3:
            waiting.pop()()  # there is nothing left for it
        return True

    got = _read(deltas, interval=gathering, pause=pause)
    assert [len(delta.token_ids) for delta in got] == [1, 3, 1, 1]
    _check_same(got, deltas)


def test_a_front_is_busy_above_seven_tenths_and_stays_so_until_it_is_well_below():
    gathering = Gathering()
    found = []
    for share in (0.69, 0.71, 0.5, 0.36, 0.34, 0.5):
        gathering.judge(share)
        found.append(gathering.is_busy)
    assert found == [False, True, True, True, False, False]


def test_gathered_tokens_come_by_themselves():
    async def scenario():
        gathering, woken = Gathering(), []
        gathering.put_off(lambda: woken.append(1))
        gathering.put_off(lambda: woken.append(2))
        await until(lambda: len(woken) == 2)
        gathering.put_off(lambda: woken.append(3))
        await until(lambda: woken == [1, 2, 3])

    asyncio.run(scenario())


def test_a_front_looks_at_how_busy_it_is_only_while_streams_ask(monkeypatch):
    monkeypatch.setattr("tureen.serving.coalescing.LOOK_S", 0.0)

    async def scenario():
        gathering = Gathering()
        for _ in range(2):
            gathering.judge(0.9)
            assert gathering.is_wanted()
            await until(lambda: gathering._timer is None)
            assert not gathering.is_busy

    asyncio.run(scenario())


def test_a_thread_that_computes_is_seen_to_be_busy():
    async def scenario():
        gathering = Gathering()
        await busy_until(gathering.is_wanted)
        await until(lambda: not gathering.is_wanted())

    async def busy_until(condition):
        while not condition():
            sum(range(20_000))
            await asyncio.sleep(0)

    asyncio.run(scenario())
