"""What clients of a simulated server do, and what each must be answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from exchange import Exchange
from solo import SHAPES, Shape, Solo, solo

from tureen.errors import Conflict, Unavailable

if TYPE_CHECKING:
    from simulation import Simulation

EVENT = re.compile(r"(?:id: (\S+)\n)?(event: error\n)?data: (.*)\n\n")
STEMS = ("the quick brown fox jumps over", "aaaaaaaaaaaaaaaaaaaaaaaa", "pack my box with five dozen jugs and then")


class Wish(NamedTuple):
    """A body, and what each of its outputs is when it runs alone."""

    body: dict[str, Any]
    answers: list[Solo]
    may_be: frozenset[str]  # codes of errors that it may be answered with


def draw_wish(rng: random.Random, sim: Simulation, name: str) -> Wish:
    prompts = [_prompt(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    count, seed = rng.choice([1, 1, 1, 2]), rng.randrange(2**40)
    max_new, is_greedy = rng.choice([0, 1, 3, 9, 16, 24]), rng.random() < 0.5
    shape = rng.choice(SHAPES) if rng.random() < 0.15 else None
    stops = tuple(rng.choice(["e", "ab", "xyz", "q", "th"]) for _ in range(rng.choice([0, 0, 1, 2])))
    params: dict[str, Any] = {"max_new_tokens": max_new, "sampling_seed": seed, "n": count}
    params |= {"temperature": 0} if is_greedy else {}
    params |= {"stop": list(stops)} if stops else {}
    if shape is not None:
        params |= {"regex": shape.regex, "close_early": max_new >= len(shape.places)}  # else refused
    body: dict[str, Any] = {"text": prompts if len(prompts) > 1 else prompts[0], "sampling_params": params}
    codes = set(sim.codes)
    if rng.random() < 0.5:
        body["rid"] = name
    elif rng.random() < 0.3:
        body["rid"] = f"shared-{rng.randrange(2)}"
        codes.add("duplicate_rid")
    if rng.random() < 0.15:
        body[rng.choice(["deadline_ms", "ttft_deadline_ms"])] = rng.choice([1, 60, 900])
        codes.add("deadline_unreachable")
    if rng.random() < 0.6:
        body["stream"] = True
    answers = [
        _solo(one, seed + sample, is_greedy, max_new, stops, shape) for one in prompts for sample in range(count)
    ]
    return Wish(body, answers, frozenset(codes))


def _prompt(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return "say:" + rng.choice(["hello", "the xyz of it", "ab"])
    stem = rng.choice(STEMS)
    return stem[: rng.randrange(1, len(stem))] + rng.choice(["", "!", "one", "two"])


def _solo(prompt: str, seed: int, is_greedy: bool, max_new: int, stops: tuple[str, ...], shape: Shape | None) -> Solo:
    return solo(list(prompt.encode()), seed=seed, is_greedy=is_greedy, max_new_tokens=max_new, stops=stops, shape=shape)


class Reader:
    """What a client knows of the outputs it asked for, event by event."""

    def __init__(self, sim: Simulation, wish: Wish) -> None:
        self._sim = sim
        self._wish = wish
        self.last_id: str | None = None
        self.num_events = 0
        self._texts = [""] * len(wish.answers)
        self.finishes: dict[int, str] = {}
        self.error: str | None = None
        self.is_done = False

    def read(self, text: str) -> None:
        """All events of a stream, or of one that goes on; checks each against what was there before."""
        blocks = text.split("\n\n")
        assert blocks.pop() == "", "a stream that ends within an event"
        for block in blocks:
            if block.startswith(":"):
                continue
            found = EVENT.fullmatch(block + "\n\n")
            assert found is not None, block
            assert not self.is_done, "an event after the last"
            self.last_id = found[1] or self.last_id
            self.num_events += 1
            if found[3] == "[DONE]":
                self.is_done = True
            elif found[2] or "error" in json.loads(found[3]):
                assert self.error is None
                self.error = json.loads(found[3])["error"]["code"] or ""
            else:
                self._take(json.loads(found[3]))

    def take_whole(self, answer: Any) -> None:
        """The body of an answer that is no stream."""
        for index, one in enumerate(answer if isinstance(answer, list) else [answer]):
            self._take(one | {"index": index})
        assert len(self.finishes) == len(self._wish.answers)
        self.is_done = True

    def _take(self, one: dict[str, Any]) -> None:
        index = one.get("index", 0)
        assert index not in self.finishes, "an output goes on after its end"
        expected, text = self._wish.answers[index], one["text"]
        assert text.startswith(self._texts[index]), "text that was sent is taken back"
        self._texts[index] = text
        assert one["output_ids"] == expected.token_ids[: len(one["output_ids"])], (one, expected)
        finish = one["meta_info"]["finish_reason"]
        if finish is None:
            assert expected.text.startswith(text), (text, expected)
            return
        self.finishes[index] = finish["type"]
        self._sim.note(f"answered {index}: {finish}")
        if finish["type"] == "abort":
            if finish["reason"] is None:  # how this dialect says that one of several has failed
                assert self._wish.may_be & {"poison", "draining"}, finish
                self.finishes[index] = "error"
                self._sim.tally.unknown(1)
            assert expected.raw.startswith(text), (text, expected)
        else:
            assert (text, finish["type"]) == (expected.text, expected.finish)
            self._sim.tally.ended(finish["type"], len(one["output_ids"]), one["meta_info"]["prompt_tokens"])


async def generate(sim: Simulation, rng: random.Random, name: str) -> None:
    """One request, perhaps left and gone on with, perhaps sent twice."""
    wish = draw_wish(rng, sim, name)
    headers = {}
    if rng.random() < 0.25:
        headers["idempotency_key"] = f"key-{name}"
    exchange = sim.send("POST", "/generate", wish.body, **headers)
    reader = Reader(sim, wish)
    if rng.random() < sim.faults.leave:
        await _leave_some_time(sim, rng, exchange)
        left_s = sim.clock.now_s
        sim.note(f"{name} leaves")
        if not exchange.is_complete:
            await exchange.leave()
            await _come_back(sim, rng, wish, exchange, left_s, headers)
            return
    if rng.random() < sim.faults.stall:
        exchange.pace_s = rng.choice([0.01, 0.2, 5, 1e9])
        if exchange.pace_s > 1000 and not exchange.is_complete:
            sim.note(f"{name} stalls")
            await exchange.give_up()
            sim.tally.unknown(len(wish.answers))
            return
    if rng.random() < sim.faults.abort and "rid" in wish.body:
        await asyncio.sleep(rng.choice([0, 0.01, 0.3]))
        await sim.send("POST", "/abort_request", {"rid": wish.body["rid"]}).wait()
    await exchange.wait()
    if check_answer(sim, wish, exchange, reader) and headers and rng.random() < 0.7:
        again = sim.send("POST", "/generate", wish.body, **headers)
        await again.wait()
        if "idempotent-replayed" in again.headers:
            assert again.body == exchange.body, "a repeated request is answered otherwise"
        else:
            check_answer(sim, wish, again, Reader(sim, wish))


def check_answer(sim: Simulation, wish: Wish, exchange: Exchange, reader: Reader) -> bool:
    """It is complete and right, or an error that may be. Whether it went well."""
    if exchange.status != 200:
        code = exchange.error["code"]
        assert code in wish.may_be, (exchange.status, exchange.error)
        sim.tally.unknown(0 if code in sim.unmetered else len(wish.answers))
        return False
    if not wish.body.get("stream"):
        reader.take_whole(json.loads(exchange.body))
    else:
        reader.read(exchange.text)
        assert reader.is_done or reader.error, "a stream without an end"
    if reader.error is not None:
        assert reader.error in wish.may_be, reader.error
    open_ones = len(wish.answers) - len(reader.finishes)
    assert reader.error is not None or not open_ones, "a stream that ends before its outputs"
    sim.tally.unknown(open_ones)
    sim.tally.aborted(sum(finish == "abort" for finish in reader.finishes.values()))
    return reader.error is None


async def _leave_some_time(sim: Simulation, rng: random.Random, exchange: Exchange) -> None:
    when = rng.choice(["now", "soon", "bytes", "bytes"])
    if when == "soon":
        await asyncio.sleep(rng.choice([0, 0.01, 0.2, 1.0]))
    elif when == "bytes":
        size = rng.choice([1, 300, rng.randrange(1, 3000)])
        await exchange.wait(lambda: len(exchange.body) > size)


async def _come_back(
    sim: Simulation, rng: random.Random, wish: Wish, exchange: Exchange, left_s: float, headers: dict[str, str]
) -> None:
    """Go on with the stream that was left, where the server keeps streams."""
    reader = Reader(sim, wish)
    seen = exchange.text[: exchange.text.rfind("\n\n") + 2] if exchange.status == 200 else ""
    if not (wish.body.get("stream") and sim.config.resume_grace_s and "id: " in seen) or rng.random() < 0.1:
        sim.tally.unknown(len(wish.answers))
        return
    reader.read(seen)
    await asyncio.sleep(rng.choice([0, 0.1, 3, sim.config.resume_grace_s * 2]))
    name = exchange.headers["x-request-id"]
    more = {"last_event_id": reader.last_id} if reader.last_id is not None else {}
    back = sim.send("GET", f"/generate/{name}/events", **more)
    await back.wait()
    if back.status == 404:
        assert sim.clock.now_s - left_s >= sim.config.resume_grace_s or sim.has_closed, (
            "a stream is forgotten too early"
        )
        sim.tally.unknown(len(wish.answers))
        return
    assert back.status == 200, back.text
    reader.read(back.text)
    assert reader.is_done or reader.error, "a stream without an end"
    sim.note(f"{name} went on")
    sim.tally.unknown(len(wish.answers) - len(reader.finishes))
    sim.tally.aborted(sum(finish == "abort" for finish in reader.finishes.values()))


async def talk(sim: Simulation, rng: random.Random, name: str) -> None:
    """A session of a few turns, each of which continues the one before."""
    used_s = sim.clock.now_s  # at the earliest: the client may hear of it long after
    opened = sim.send("POST", "/open_session", {"capacity_of_str_len": 4000})
    await opened.wait()
    if opened.status != 200:
        assert opened.error["code"] in sim.codes, opened.text
        return
    session, ids, last = json.loads(opened.body), [], None
    for number in range(rng.choice([1, 2, 3])):
        await asyncio.sleep(rng.choice([0, 0.2, 5, 5, sim.config.session_timeout_s + 1]))
        text, max_new, seed = rng.choice(["hi", "and", "more of it"]), rng.choice([2, 6, 10]), rng.randrange(2**20)
        params = {"max_new_tokens": max_new, "sampling_seed": seed, "ignore_eos": True}
        of = {"id": session} | ({"rid": last} if last is not None else {})
        rid = f"{name}-turn{number}"
        wish = Wish(
            {"text": text, "sampling_params": params, "session_params": of, "rid": rid},
            [solo([*ids, *text.encode()], seed=seed, is_greedy=False, max_new_tokens=max_new)],
            sim.codes | {"session_not_found"},
        )
        sent_s = sim.clock.now_s
        exchange = sim.send("POST", "/generate", wish.body)
        await exchange.wait()
        if exchange.status != 200 and exchange.error["code"] == "session_not_found":
            unused_s = sim.clock.now_s - used_s
            assert unused_s >= sim.config.session_timeout_s, f"a session is closed after {unused_s} s"
            sim.tally.unknown(0)
            return
        reader = Reader(sim, wish)
        if not check_answer(sim, wish, exchange, reader) or reader.finishes[0] == "abort":
            return
        ids, last, used_s = [*ids, *text.encode(), *wish.answers[0].token_ids], rid, sent_s
    if rng.random() < 0.5:
        closed = sim.send("POST", "/close_session", {"session_id": session})
        await closed.wait()
        assert closed.status == 200 or sim.clock.now_s - used_s >= sim.config.session_timeout_s, closed.text


async def pause(sim: Simulation, rng: random.Random, name: str) -> None:
    """An operator holds the engine up for a while."""
    mode = rng.choice(["in_place", "retract", "abort"])
    begun = sim.send("POST", "/pause_generation", {"mode": mode})
    await begun.wait()
    await asyncio.sleep(rng.choice([0, 0.1, 4]))
    wanted = {200, 503} if sim.may_be_lost else {200}
    assert begun.status in wanted, begun.text
    while True:  # who asks for a pause sees that it ends
        ended = sim.send("POST", "/continue_generation", {})
        await ended.wait()
        assert ended.status in wanted, ended.text
        if ended.status == 200 or sim.has_closed:
            return
        await asyncio.sleep(5)


async def move(sim: Simulation, rng: random.Random, name: str) -> None:
    """An operator takes the requests from a replica for a while, or starts it again."""
    number, verb = rng.randrange(sim.num_replicas), rng.choice(["drain", "restart"])
    answer = sim.send("POST", f"/replicas/{verb}", {"replica": number})
    await answer.wait()
    assert answer.status == 200, answer.text
    if verb == "drain":
        await asyncio.sleep(rng.choice([0, 0.1, 4]))
        undrained = sim.send("POST", "/replicas/undrain", {"replica": number})
        await undrained.wait()
        assert undrained.status == 200, undrained.text


async def exchange_weights(sim: Simulation, rng: random.Random, name: str) -> None:
    """An operator gives the same weights again to one replica after the other."""
    with contextlib.suppress(Conflict, Unavailable):
        await sim.client.call("roll_weights", version=None, number=0)


async def look(sim: Simulation, rng: random.Random, name: str) -> None:
    """What operators and load balancers ask for, in between."""
    path = rng.choice(["/health", "/metrics", "/server_info", "/flush_cache", "/generate/nobody/events"])
    exchange = sim.send("POST" if path == "/flush_cache" else "GET", path)
    was_well = sim.is_well
    await exchange.wait()
    wanted = {"/flush_cache": (200, 400, 409), "/generate/nobody/events": (404,)}.get(path, (200,))
    assert exchange.status in wanted or (sim.may_be_lost and exchange.status == 503), (path, exchange.text)
    if path == "/health":
        assert exchange.status == 200 or not (was_well and sim.is_well), exchange.text
        assert exchange.status == 503 or was_well or sim.is_well, "a lost engine is said to be well"
