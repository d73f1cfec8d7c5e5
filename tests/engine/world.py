"""A small world around the real engine: checked steps, random workloads, and what each request must answer."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np
from byte_tokenizer import make_byte_tokenizer
from toy_grammar import BROKEN, COMPLETE, ToyCompiler, rule

from tureen.contract.params import SamplingParams
from tureen.contract.runner import Batch, Capacity, Masks, Row, StepOutput
from tureen.contract.types import NO_TOKEN, FinishReason, GenerateRequest, LogprobSpec, MediaItem, OutputDelta
from tureen.engine.engine import Engine
from tureen.engine.queue import Schedule
from tureen.engine.scheduler import Drafters
from tureen.grammar.base import GrammarSpec
from tureen.runner.fake import FakeRunner

VOCAB_SIZE = 64
EOS_IDS = (7,)
ADAPTERS = ("", "red", "blue")  # an adapter's number is its place here
TOKENIZER = make_byte_tokenizer()


# ---- what a request must answer: the fake model written again, from the tokens alone


def _hash(*parts) -> bytes:
    data = b"".join(p if isinstance(p, bytes) else p.to_bytes(8, "little", signed=True) for p in parts)
    return blake2b(data, digest_size=8).digest()


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _logprob(history: bytes, token: int) -> float:
    return -(_int(_hash(history, token)) % 9999 + 1) / 1000


def _hidden(stored: list[bytes]) -> list[bytes]:
    """One number for each position: the first byte of the hash of all that is stored up to there."""
    return [struct.pack("<f", _hash(*stored[: at + 1])[0]) for at in range(len(stored))]


def _expected_hidden(request: GenerateRequest, stored: list[bytes], num_output: int) -> list[bytes]:
    num_computed = len(request.token_ids) + max(0, num_output - 1)
    wanted = _hidden(stored[:num_computed])
    return {"none": [], "last": wanted[-1:], "all": wanted}[request.hidden_states]


def _drawable(request: GenerateRequest, output: list[int], ends: set[int]) -> set[int]:
    """What may come next; nothing = the output ends here."""
    params = request.params
    banned = ends if len(output) < params.min_new_tokens else set()
    if request.grammar is None:
        return set(range(VOCAB_SIZE)) - banned
    tokens, is_accepting = found = rule(request.grammar.text, tuple(output), VOCAB_SIZE, EOS_IDS)
    if found == COMPLETE:
        return set()
    if not is_accepting and len(tokens) == 1:  # forced: nobody draws it
        return set(tokens)
    may_end = is_accepting and not (params.ignore_eos and tokens)
    allowed = {*tokens, *(EOS_IDS if may_end else ())} - banned
    assert allowed or is_accepting
    return allowed


def _scored_prompt(request: GenerateRequest, stored: list[bytes]) -> list[tuple[float | None, int]]:
    prompt, spec = request.token_ids, request.logprobs
    if not spec or not 0 <= spec.prompt_start < len(prompt):
        return []
    places = range(spec.prompt_start, len(prompt) - 1)
    after = [(_logprob(_hash(*stored[: at + 1]), prompt[at + 1]), prompt[at + 1]) for at in places]
    return [(None, prompt[spec.prompt_start]), *after]


def embedding(digest: str, index: int) -> bytes:
    """What the fake encoder makes of a picture's token."""
    return struct.pack("<f", _hash(digest.encode(), index)[0])


def _inputs(request: GenerateRequest) -> list[tuple[int, bytes]]:
    """What is computed of the prompt: tokens and, where there are none, embeddings."""
    if request.embeds:
        return [(NO_TOKEN, request.embeds[at : at + 4]) for at in range(0, len(request.embeds), 4)]
    inputs = [(token, b"") for token in request.token_ids]
    for item in request.media:
        for index in range(item.num_tokens):
            inputs[item.start + index] = (NO_TOKEN, embedding(item.digest, item.rows_before + index))
    return inputs


def expected(request: GenerateRequest, context_len: int, adapter: int = 0):
    """(output ids, finish, output logprobs, prompt logprobs, what is stored) of a request running alone."""
    stored: list[bytes] = []
    for token, embedding in _inputs(request):
        stored.append(_hash(stored[-1] if stored else b"", token + (adapter << 32), embedding))
    prompt, params = request.token_ids, request.params
    scored = _scored_prompt(request, stored)
    grammar = request.grammar
    ends = {*params.stop_token_ids, *(() if params.ignore_eos and grammar is None else EOS_IDS)}
    output, logprobs = [], []
    while len(output) < request.max_new_tokens:
        history = _hash(*stored)
        seed = 0 if params.temperature == 0 else request.seed
        token = _int(_hash(history, seed, *output[-4:], len(output))) % VOCAB_SIZE
        allowed = _drawable(request, output, ends)
        if not allowed:
            complete = FinishReason(type="stop", matched=output[-1] if output else None)
            return output, complete, logprobs, scored, stored
        while token not in allowed:
            token = (token + 1) % VOCAB_SIZE
        output.append(token)
        logprobs.append((_logprob(history, token), token))
        stored.append(_hash(stored[-1], token + (adapter << 32)))
        if len(output) >= params.min_new_tokens:
            if token in ends:
                return output, FinishReason(type="stop", matched=token), logprobs, scored, stored
            if chr(token) in params.stop:
                return output, FinishReason(type="stop", matched=chr(token)), logprobs, scored, stored
        if grammar is not None and rule(grammar.text, tuple(output), VOCAB_SIZE, EOS_IDS) == COMPLETE:
            return output, FinishReason(type="stop", matched=token), logprobs, scored, stored
        if len(prompt) + len(output) >= context_len:
            break
    return output, FinishReason(type="length", length=len(output)), logprobs, scored, stored


# ---- the engine in its box


class BooksWrong(BaseException):
    """A broken invariant seen from inside the runner; the engine does not catch it as a fault of the runner."""


def demand(truth: bool, what: str) -> None:
    if not truth:
        raise BooksWrong(what)


class CheckedRunner(FakeRunner):
    """Checks every batch against the engine's books before it runs, and makes NaN of pages that nobody holds."""

    engine: Engine
    token_budget: int
    last: Batch | None = None

    def run(self, batch: Batch, masks: Masks | None = None) -> StepOutput:
        self.last = batch
        pool, size = self.engine.cache.pool, self.engine.cache.page_size
        requests = {sequence.slot: sequence.request for sequence in self.engine.scheduler.running}
        *before, last = [len(row.token_ids) for row in batch.rows]
        demand(sum(before) < self.token_budget, "the token budget")
        demand(0 < sum(before) + last <= self.token_budget or _is_picture(batch.rows[-1]), "the token budget")
        slots = [row.slot for row in batch.rows]
        demand(len(set(slots)) == len(slots), "two rows in one slot")
        for row in batch.rows:
            end = row.start + len(row.token_ids)
            demand(row.start < end <= len(row.pages) * size, "a row without tokens, or without room for them")
            for page in row.pages[row.start // size : -(-end // size)]:
                demand(pool.count(page) == 1, f"page {page} is written while others hold it")
        _check_states(batch, self.capacity().num_states)
        for row in batch.rows:
            _check_places(row, requests[row.slot])
            _check_pictures(row, requests[row.slot])
        for page in range(pool.num_pages):
            if pool.count(page) == 0:
                self.pages.poison(page)
        self._check_windows(batch)
        return super().run(batch, masks)

    def _check_windows(self, batch: Batch) -> None:
        windows, size = self.engine.cache.windows, self.engine.cache.page_size
        if not windows.is_used:
            return
        for row in batch.rows:
            first, last = row.start // size - row.window_from, (row.start + len(row.token_ids) - 1) // size
            demand(last < row.window_from + len(row.window_pages), "a row without room in its window pages")
            for page in row.window_pages[first : last + 1 - row.window_from]:
                demand(windows.pool.count(page) == 1, f"window page {page} is written while others hold it")
        for page in range(windows.pool.num_pages):
            if windows.pool.count(page) == 0:
                self.pages.poison_window(page)


def _check_places(row: Row, request: GenerateRequest) -> None:
    """Each token's frame, row and column, counted from the first token of the prompt."""
    grids = {item.start: item.grid for item in request.media if item.grid}
    if not grids:
        demand(row.places == b"", "a row of text with places")
        return
    places: list[tuple[int, int, int]] = []
    following = 0
    while len(places) < row.start + len(row.token_ids):
        rows, columns = grids.get(len(places), (1, 1))
        added = [(following, following + y, following + x) for y in range(rows) for x in range(columns)]
        places += added
        following = max(max(place) for place in added) + 1
    wanted = places[row.start : row.start + len(row.token_ids)]
    found = np.frombuffer(row.places, np.int32).reshape(-1, 3).tolist()
    demand(found == [list(place) for place in wanted], "a token in another place")


def _check_pictures(row: Row, request: GenerateRequest) -> None:
    """No step ends inside a whole picture, and the row names those that its tokens belong to."""
    end = row.start + len(row.token_ids)
    named = []
    for item in request.media:
        tokens = range(item.start, item.start + item.num_tokens)
        if item.is_whole and any(position in tokens for position in range(row.start, end)):
            demand(end not in tokens[1:], "a step that divides a picture")
            named.append((tokens[0], tokens[-1] + 1))
    demand(row.pictures == tuple(named), "pictures that a row does not name")


def _is_picture(row: Row) -> bool:
    """Whether the row is a whole picture, or the end of one."""
    return any(start <= row.start and row.start + len(row.token_ids) == end for start, end in row.pictures)


def _check_states(batch: Batch, num_states: int) -> None:
    """Rows may be computed in any order, and once more: no state may be read and written, or written twice."""
    rows = batch.rows if num_states else ()
    read = {row.state_from for row in rows if row.start}
    written = [number for row in rows for number in (row.state_to, *(number for _, number in row.state_saves))]
    demand(all(0 <= number < num_states for number in (*read, *written)), "a state that is not there")
    demand(len(set(written)) == len(written), "a state is written twice")
    demand(not read & set(written), "a state is read and written")


@dataclass
class Answer:
    """Everything one request was sent."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    hidden_states: list[bytes] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: object = None
    num_deltas: int = 0

    def take(self, delta: OutputDelta) -> None:
        assert self.finish is None, "a delta after the last"
        assert not delta.prompt_logprobs or self.num_deltas == 0, "prompt logprobs come once, first"
        assert delta.token_ids or delta.finish or (delta.usage and delta.usage.computed_tokens), (
            "a delta that says nothing"
        )
        self.num_deltas += 1
        self.token_ids += delta.token_ids
        self.text += delta.text
        assert len(self.text) <= len(self.token_ids), "text of tokens that were not sent"
        assert delta.usage.forced_tokens <= delta.usage.output_tokens
        assert delta.usage.output_tokens == len(self.token_ids) or delta.finish
        if self.usage is not None:
            assert delta.usage.cached_tokens == self.usage.cached_tokens
            assert delta.usage.forced_tokens >= self.usage.forced_tokens
        self.logprobs += [p.token for p in delta.output_logprobs]
        self.prompt_logprobs += [p.token for p in delta.prompt_logprobs]
        self.hidden_states += delta.hidden_states
        self.finish = delta.finish
        self.usage = delta.usage


def going_on(request: GenerateRequest, sent: Answer | OutputDelta) -> GenerateRequest:
    """What asks another engine for the rest of an answer."""
    if not sent.token_ids:
        return request
    return msgspec.structs.replace(
        request,
        resumed=tuple(sent.token_ids),
        resumed_cached=sent.usage.cached_tokens,
        resumed_states=len(sent.hidden_states),
    )


class World:
    """An engine with a fake runner, stepped under all invariants."""

    def __init__(
        self,
        *,
        num_pages=64,
        page_size=4,
        max_rows=8,
        context_len=4096,
        token_budget=32,
        fault=None,
        choose=None,
        make_runner=CheckedRunner,
        drafter=None,
        num_saved=None,
        windows=(0, 0),
        **options,
    ) -> None:
        """num_saved: saved states of layers without attention; None: the model has no such layers. windows: pages of
        layers with a window, and the window."""
        self._options = {
            "num_pages": num_pages,
            "page_size": page_size,
            "max_rows": max_rows,
            "context_len": context_len,
            "token_budget": token_budget,
            "fault": fault,
            "choose": choose,
            "make_runner": make_runner,
            "drafter": drafter,
            "num_saved": num_saved,
            "windows": windows,
            **options,
        }
        num_states = 0 if num_saved is None else 2 * max_rows + 1 + num_saved
        capacity = Capacity(
            num_pages,
            page_size,
            max_rows,
            VOCAB_SIZE,
            context_len,
            num_states=num_states,
            num_window_pages=windows[0],
            window=windows[1],
        )
        self.compiler = ToyCompiler(VOCAB_SIZE, EOS_IDS)
        self.runner = make_runner(capacity, fault=fault, choose=choose)
        self.engine = Engine(
            self.runner, TOKENIZER, eos_token_ids=EOS_IDS, token_budget=token_budget, compiler=self.compiler, **options
        )
        self.engine.scheduler.drafters = None if drafter is None else Drafters(drafter)
        for name in ADAPTERS[1:]:
            self.engine.call("load_adapter", name=name, path=name)
        self.runner.engine, self.runner.token_budget = self.engine, token_budget
        self.context_len = min(context_len, num_pages * page_size)
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.num_steps = 0
        self.ended: list[str] = []  # ids in order
        self._num_sent_before = 0  # tokens, by engines that this one replaces

    def add(self, request: GenerateRequest) -> None:
        self.engine.add(request)
        self.requests[request.id] = request
        self.answers[request.id] = Answer()

    def replaced(self, **changes) -> World:
        """The engine is lost with all it held; another one goes on with what has not ended."""
        other = World(**(self._options | changes))
        other.answers, other.requests, other.ended = self.answers, self.requests, self.ended
        other._num_sent_before = sum(len(answer.token_ids) for answer in self.answers.values())
        for request_id, answer in self.answers.items():
            if answer.finish is None:
                other.engine.add(going_on(self.requests[request_id], answer))
        return other

    def step(self) -> list[OutputDelta]:
        self.num_steps += 1
        before = self.runner.num_calls
        if self.engine.is_preparing:
            self.engine.prepare()
        schedulable = any(answer.finish is None for answer in self.answers.values()) and self._has_sequences()
        if self.engine.stats().is_paused:
            schedulable = False
        deltas = self.engine.step()
        for delta in deltas:
            self.answers[delta.id].take(delta)
            if delta.finish is not None:
                self.ended.append(delta.id)
        assert not schedulable or self.runner.num_calls > before, "nothing ran though something could"
        self.check()
        return deltas

    def drain(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work and not self.engine.is_preparing:
                self.check_idle()
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def _has_sequences(self) -> bool:
        scheduler = self.engine.scheduler
        return bool(scheduler.running or scheduler.queue.waiting)

    def check(self) -> None:
        """The books are right after a step."""
        cache, scheduler = self.engine.cache, self.engine.scheduler
        assert cache.check() == []
        stats = self.engine.stats()
        held = {page for sequence in scheduler.running for page in sequence.table.pages}
        assert stats.num_free_pages + stats.num_cached_pages + len(held) == stats.num_pages
        live = {page for table in cache._open for page in table.live.pages}
        assert (stats.num_used_window_pages, stats.num_window_pages) == (len(live), cache.windows.pool.num_pages)
        waiting, running = list(scheduler.queue.candidates()), scheduler.running
        open_ids = [request_id for request_id, answer in self.answers.items() if answer.finish is None]
        ended_unsent = [delta.id for delta in self.engine._ended]
        engine = self.engine
        preparing = (
            *engine.preparing.grammars.waiting,
            *engine.preparing.replays.waiting,
            *engine.preparing.client_code.waiting,
            *engine.preparing.encoders.waiting,
        )
        in_engine = [sequence.request.id for sequence in (*waiting, *running, *preparing)]
        assert sorted(in_engine + ended_unsent) == sorted(open_ids)
        assert sorted([s.slot for s in running] + scheduler._free_slots) == list(range(self.runner.capacity().max_rows))
        for sequence in waiting:
            assert (sequence.table, sequence.num_computed) == (None, 0)
        for sequence in running:
            self._check_running(sequence)

    def _check_running(self, sequence) -> None:
        table, size = sequence.table, self.engine.cache.page_size
        assert len(table.nodes) * size <= sequence.num_computed <= len(table.pages) * size
        assert sequence.num_computed < sequence.num_needed
        assert sequence.needs_run
        assert len(set(table.pages)) == len(table.pages)
        assert table.room == (table.live.end if self.engine.cache.windows.is_used else len(table.pages)) * size
        assert not (sequence.request.embeds and table.nodes), "embeddings in the prefix cache"
        tokens = [token for node in table.nodes for token in node.key if isinstance(token, int)]
        assert tokens == sequence.token_ids[: len(table.nodes) * size]
        if table.nodes:
            assert table.nodes[0].key[:2] == sequence.namespace

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        engine, pool = self.engine, self.engine.cache.pool
        assert engine.cache.num_available == pool.num_pages
        windows = engine.cache.windows
        assert windows.num_available == windows.pool.num_pages
        assert (engine._sequences, engine.scheduler.running, engine.scheduler.queue.waiting) == ({}, [], [])
        assert (len(engine.preparing.grammars.waiting), self.compiler.pending) == (0, [])
        assert (len(engine.preparing.encoders.waiting), engine.preparing.encoders._current) == (0, None)
        assert len(engine.preparing.replays.waiting) == 0
        assert not engine.cache._open
        assert all(answer.finish is not None for answer in self.answers.values())
        stats = engine.stats()
        num_sent = sum(len(answer.token_ids) for answer in self.answers.values())
        assert stats.total_output_tokens == num_sent - self._num_sent_before

    def check_answer(self, request_id: str, *, may_fail: bool = False) -> None:
        """The answer is that of the request alone; an aborted or failed one is its beginning."""
        request, answer = self.requests[request_id], self.answers[request_id]
        if request.grammar is not None and request.grammar.text == BROKEN:
            assert answer.token_ids == []
            assert (answer.finish.type, answer.finish.code) in (("error", "invalid_regex"), ("abort", None))
            return
        adapter = ADAPTERS.index(request.adapter)
        output, finish, logprobs, scored, stored = expected(request, self.context_len, adapter)
        if answer.finish.type == "abort" or (may_fail and answer.finish.type == "error"):
            assert answer.token_ids == output[: len(answer.token_ids)]
            if request.hidden_states == "all":
                assert answer.hidden_states == _hidden(stored)[: len(answer.hidden_states)]
        else:
            assert answer.hidden_states == _expected_hidden(request, stored, len(output))
            assert (answer.token_ids, answer.finish) == (output, finish)
            assert answer.prompt_logprobs == scored
        if request.logprobs is not None:
            assert answer.logprobs == logprobs[: len(answer.token_ids)]
        else:
            assert answer.logprobs == []

    def check_answers(self, **options) -> None:
        for request_id in self.answers:
            self.check_answer(request_id, **options)


def make_request(
    request_id="r",
    token_ids=(1, 2, 3),
    *,
    max_new_tokens=4,
    seed=0,
    logprobs=None,
    priority=0,
    cache_salt="",
    client="",
    **params,
) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        token_ids=tuple(token_ids),
        params=SamplingParams(**params),
        max_new_tokens=max_new_tokens,
        seed=seed,
        logprobs=logprobs,
        priority=priority,
        cache_salt=cache_salt,
        client=client,
    )


def with_media(request: GenerateRequest, *places: tuple[int, int, str]) -> GenerateRequest:
    """The same with pictures in place of tokens: (start, number of tokens, digest)."""
    token_ids = list(request.token_ids)
    for start, num_tokens, digest in places:
        token_ids[start : start + num_tokens] = [NO_TOKEN - 1 - int(digest[:15], 16)] * num_tokens
    media = tuple(MediaItem(digest, start, num_tokens, b"pixels", (1, 1, 2, 3)) for start, num_tokens, digest in places)
    return msgspec.structs.replace(request, token_ids=tuple(token_ids), media=media)


def _random_media(rng: random.Random, request: GenerateRequest) -> GenerateRequest:
    """Pictures of few kinds somewhere in the prompt, their log-probabilities not asked for."""
    cuts = sorted(rng.randrange(len(request.token_ids) + 1) for _ in range(2 * rng.choice([1, 1, 2, 3])))
    spans = [(start, end) for start, end in zip(cuts[::2], cuts[1::2], strict=True) if start < end]
    places = [(start, end - start, f"{rng.randrange(3):x}{end - start:x}".ljust(64, "a")) for start, end in spans]
    found = with_media(request, *places)
    if spans and spans[0][0] % 2:
        grids = [random.Random(start).choice(_grids(end - start)) for start, end in spans]
        media = (msgspec.structs.replace(item, grid=grid) for item, grid in zip(found.media, grids, strict=True))
        found = msgspec.structs.replace(found, media=tuple(media))
    elif spans and spans[0][0] % 4:
        media = (msgspec.structs.replace(item, is_whole=True) for item in found.media)
        found = msgspec.structs.replace(found, media=tuple(media))
    end = max((end for _, end in spans), default=0)
    if found.logprobs is not None and 0 <= found.logprobs.prompt_start < end:
        found = msgspec.structs.replace(found, logprobs=LogprobSpec())
    return found


def _grids(count: int) -> list[tuple[int, int]]:
    return [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]


def random_tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))


def random_requests(rng: random.Random, capacity: int, count: int) -> list[GenerateRequest]:
    """Requests that fit `capacity` tokens, many with common prefixes, some n samples of one prompt."""
    stems = [random_tokens(rng, rng.randrange(0, max(1, capacity // 2))) for _ in range(3)]
    requests = []
    while len(requests) < count:
        prompt = (rng.choice(stems) + random_tokens(rng, rng.randrange(0, 6)))[: capacity - 1] or (1,)
        room = capacity - len(prompt)
        max_new = rng.choice([0, 1, room, rng.randrange(0, room + 1), rng.randrange(0, min(room, 12) + 1)])
        start = rng.choice([-1, -1, 0, rng.randrange(len(prompt)), len(prompt) - 1, len(prompt)])
        base = make_request(
            f"q{len(requests)}",
            prompt,
            max_new_tokens=max_new,
            seed=rng.randrange(-5, 2**40),
            logprobs=LogprobSpec(prompt_start=start) if rng.random() < 0.4 else None,
            priority=rng.randrange(3),
            cache_salt=rng.choice(["", "", "", "salt"]),
            client=("", "ann", "bob")[max_new % 3],
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(9, 10, 11, 12) if rng.random() < 0.2 else (),
            stop=("!",) if rng.random() < 0.2 else (),
            min_new_tokens=rng.randrange(max_new + 1) if rng.random() < 0.3 else 0,
        )
        base = msgspec.structs.replace(base, hidden_states=rng.choice(["none", "none", "none", "last", "all"]))
        if rng.random() < 0.15:
            base = msgspec.structs.replace(
                base,
                token_ids=(NO_TOKEN,) * len(prompt),
                embeds=rng.randbytes(4 * len(prompt)),
                logprobs=base.logprobs and LogprobSpec(),
            )
        elif rng.random() < 0.25:
            base = _random_media(rng, base)
        if rng.random() < 0.4:
            text = BROKEN if rng.random() < 0.1 else f"g{rng.randrange(10**6)} {rng.choice([0, 1, 3, 12, 40])}"
            base = msgspec.structs.replace(base, grammar=GrammarSpec("regex", text), grammar_field="regex")
        if rng.random() < 0.3:
            base = msgspec.structs.replace(base, adapter=rng.choice(ADAPTERS))
        for sample in range(rng.choice([1, 1, 2, 4])):
            requests.append(msgspec.structs.replace(base, id=f"{base.id}.{sample}", seed=base.seed + sample))
    return requests[:count]


def _random_faults(seed: int, rate: float):
    def fault(call, row):
        rng = random.Random(f"{seed} {call} {row.slot}")
        return rng.choice(["poison", "raise"]) if rng.random() < rate else None

    return fault if rate else None


def _pause(world: World, rng: random.Random) -> None:
    """Nothing runs during a pause; what was there goes on after it."""
    num_calls = world.runner.num_calls
    world.engine.control.pause(rng.choice(["abort", "retract", "in_place"]))
    for _ in range(rng.randrange(3)):
        world.step()
    assert world.runner.num_calls == num_calls
    assert not world.engine.has_work or world.engine._ended
    world.engine.control.resume()


def _random_schedule(rng: random.Random, seed: int) -> Schedule:
    schedule = Schedule(rng.choice(["fcfs", "lpm"]), rng.random() < 0.5)
    return schedule._replace(policy="fair") if seed % 3 == 2 else schedule


def simulate(
    seed: int,
    *,
    page_size: int,
    num_requests: int = 16,
    abort_rate: float = 0.02,
    fault_rate: float = 0.0,
    loss_rate: float = 0.0,
    window: int = 0,
    spare_tokens: int = 0,
    **options,
) -> World:
    """Random arrivals, aborts, pauses, faults and losses of the engine until idle.

    window: the window of some layers; 0: no layer has one. spare_tokens: the tokens for which there are window pages
    beyond those that one request needs.
    """
    rng = random.Random(seed)
    tokens = rng.choice([24, 48, 96, 200])
    max_rows, context_len = rng.choice([1, 3, 8, 8]), rng.choice([4096, tokens - 3])
    token_budget = rng.choice([1, 3, 7, 16, 64, 200])
    num_pages = max(2, tokens // page_size)
    schedule, has_prefix_cache = _random_schedule(rng, seed), rng.random() < 0.85
    todo = random_requests(rng, min(context_len, num_pages * page_size), num_requests)
    longest_step = max([token_budget, *(item.num_tokens for one in todo for item in one.media if item.is_whole)])
    num_window_pages = 2 + -(-(window + longest_step + spare_tokens) // page_size) if window else 0
    world = World(
        num_pages=num_pages,
        page_size=page_size,
        max_rows=max_rows,
        context_len=context_len,
        token_budget=token_budget,
        windows=(num_window_pages, window),
        schedule=schedule,
        prefix_cache=has_prefix_cache,
        fault=_random_faults(seed, fault_rate),
        **options,
    )
    burst = rng.choice([0.05, 0.3, 0.9, 1.0])
    while todo or world.engine.has_work or world.engine.is_preparing:
        while todo and (rng.random() < burst or not world.engine.has_work):
            world.add(todo.pop())
        if rng.random() < abort_rate:
            world.engine.abort(rng.choice(list(world.answers)))
        if rng.random() < 0.02:
            _pause(world, rng)
        if loss_rate and rng.random() < loss_rate:
            world = world.replaced()
        world.step()
    world.check_idle()
    return world
