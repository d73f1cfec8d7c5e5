"""The whole server in one thread: application, recordings, sessions, quotas, engine, all under one seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Any

from app_under_test import parse_metrics
from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from clients import exchange_weights, generate, look, move, pause, talk
from exchange import LIMIT_S, Exchange
from fake_engine import choose
from inline_compiler import InlineCompiler
from simulated_engine import Faults, SimulatedHost, Surroundings
from virtual_time import Clock, VirtualLoop, virtual_time

from tureen.admin.reporter import report_forever
from tureen.app.application import build_app
from tureen.config import Config
from tureen.contract.runner import Batch, Capacity, Masks, StepOutput
from tureen.contract.types import EngineInfo, EngineRole
from tureen.data_parallel.router import Router
from tureen.data_parallel.start import FROM_OTHERS
from tureen.engine.engine import Engine
from tureen.engine.queue import Schedule
from tureen.log import Progress
from tureen.runner.fake import FakeRunner

REFUSALS = frozenset({"queue_full", "tokens_per_minute", "too_many_requests", "too_many_sessions"})
LOST = frozenset({"engine_dead", "engine_lost", "poison"})
"""What a request may end with where engines die again and again."""

CLOSING = frozenset({"draining"})

ROLES: tuple[tuple[EngineRole, ...], ...] = (
    ("prefill", "decode"),
    ("prefill", "decode", "both"),
    ("prefill", "prefill", "decode"),
)
"""Roles of replicas that are simulated together."""


class Tally:
    """What clients were answered, to be compared with what the server counted."""

    def __init__(self) -> None:
        self.finishes: Counter[str] = Counter()
        self.tokens = 0
        self.prompt_tokens = 0
        self.num_unknown = 0  # outputs whose end no client has seen
        self.num_exchanges = 0

    def ended(self, finish: str, num_tokens: int, num_prompt: int) -> None:
        self.finishes[finish] += 1
        self.tokens += num_tokens
        self.prompt_tokens += num_prompt

    def aborted(self, count: int) -> None:
        self.finishes["abort"] += count

    def unknown(self, count: int) -> None:
        self.num_unknown += count


class Runner(FakeRunner):
    """Makes NaN of pages that nobody holds before each step."""

    engine: Engine

    def run(self, batch: Batch, masks: Masks | None = None) -> StepOutput:
        pool = self.engine.cache.pool
        for page in range(pool.num_pages):
            if pool.count(page) == 0:
                self.pages.poison(page)
        return super().run(batch, masks)


class Checker:
    """Stands for the process that judges constrained outputs: it agrees, after a while."""

    unverified = 0
    supervisor = None

    async def check_in_turn(self, spec: object, text: str) -> None:
        await asyncio.sleep(0.01)

    def close(self) -> None:
        """There is nothing to close."""


class Simulation:
    """One server and its clients, for one seed. `run` raises AssertionError where anything is not as it must be."""

    unmetered = frozenset({"duplicate_rid", "tokens_per_minute", "too_many_requests"})
    """Codes of what is refused before it is counted as a request of the model."""

    def __init__(self, seed: int, num_replicas: int = 1, roles: tuple[EngineRole, ...] = ()) -> None:
        rng = random.Random(f"plan {seed}")
        self.seed = seed
        self.num_replicas = num_replicas
        self.roles = roles or ("both",) * num_replicas
        self.clock = Clock()
        self.tally = Tally()
        self.has_closed = False
        self.faults = _draw_faults(rng)
        self.operations = [move, move, exchange_weights] if num_replicas > 1 else []
        self.closes_early = rng.random() < 0.08
        self.config = Config(
            host="127.0.0.1",
            max_queued_requests=rng.choice([2, 1000, 1000]),
            chunked_prefill_size=rng.choice([4, 16, 512]),
            schedule_policy=rng.choice(["fcfs", "lpm", "fair"]),
            resume_grace_s=rng.choice([0, 10, 30, 30]),
            session_timeout_s=60,
            max_client_requests=rng.choice([None, None, 4]),
            client_tokens_per_minute=rng.choice([None, None, 200]),
            stream_interval=rng.choice([1, 1, 3]),
            log_interval_s=5,
        )
        self.codes = REFUSALS | (LOST if self.faults.death or self.faults.freeze else frozenset())
        self.codes |= CLOSING if self.closes_early else frozenset()
        self._rng = rng

    @property
    def is_well(self) -> bool:
        return not self.has_closed and self.client.health.state == "healthy"

    @property
    def may_be_lost(self) -> bool:
        """Calls to the engine may end without an answer of it."""
        return bool(self.has_closed or self.faults.death or self.faults.freeze or self.faults.false_start)

    def run(self) -> Simulation:
        chance = random.Random(f"work {self.seed}")
        with virtual_time(self.clock, random.Random(f"ids {self.seed}")):
            self.loop = VirtualLoop(self.clock, chance)
            try:
                with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                    runner.run(self._run(chance))
                if self._wrong is not None:
                    raise self._wrong
            except BaseException as error:
                if self._wrong not in (None, error):
                    raise self._wrong from error
                error.add_note(f"seed {self.seed}; python tests/sim/run.py {self.seed}")
                raise
        return self

    @property
    def _wrong(self) -> AssertionError | None:
        return next((around.wrong for around in self.arounds if around.wrong is not None), None)

    def note(self, what: str) -> None:
        self.loop.note(what)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Exchange:
        self.tally.num_exchanges += 1
        self.note(f"{method} {path} {body if body is not None else ''} {headers or ''}")
        return Exchange(self.app, method, path, body, **headers)

    # ---- its parts

    def _make_engine(self, progress: Progress) -> tuple[Engine, EngineInfo]:
        rng = random.Random(f"engine {self.seed}")  # each is as the first one was
        pages, size = rng.choice([(16, 16), (40, 4), (64, 16)])
        rows, context_len = rng.choice([2, 4, 16]), pages * size
        runner = Runner(Capacity(pages, size, rows, VOCAB_SIZE, context_len, hidden_size=4), choose=choose)
        engine = Engine(
            runner,
            make_byte_tokenizer(),
            eos_token_ids=(EOS,),
            max_queued=self.config.max_queued_requests + (FROM_OTHERS if self.num_replicas > 1 else 0),
            token_budget=self.config.chunked_prefill_size,
            schedule=Schedule(self.config.schedule_policy, by_priority=False),
            prefix_cache=rng.random() < 0.8,
            compiler=InlineCompiler(),
        )
        runner.engine = engine
        facts: dict[str, Any] = dict.fromkeys(("model_path", "architecture", "model_type", "device", "dtype"), "fake")
        numbers = {"max_total_tokens": pages * size, "page_size": size, "hidden_size": 4, "kv_bytes_per_token": 8}
        info = EngineInfo(
            **facts,
            **numbers,
            model_name="fake-model",
            vocab_size=VOCAB_SIZE,
            context_len=context_len,
            max_running_requests=rows,
            eos_token_ids=(EOS,),
            bos_token_id=257,
            kv_folder="there is none: what is handed over is computed again",
        )
        return engine, info

    async def _run(self, chance: random.Random) -> None:
        self.arounds = [
            Surroundings(self._make_engine, self.loop, self.faults, chance, self._check_books)
            for _ in range(self.num_replicas)
        ]
        self.client: Any
        if self.num_replicas > 1:
            self.client = Router(prefill_min_tokens=8)
            makers = zip(self.arounds, self.roles, strict=True)
            await self.client.start([partial(around.connect_replica, role) for around, role in makers])
        else:
            self.client = self.arounds[0].connect()
            await self.client.start()
        self.app = build_app(self.client, make_byte_tokenizer(), self.config)
        self.state = self.app.state.server
        self.state.helpers._checker = Checker()
        for part in (self.state.sessions, self.state.quotas, self.state.recordings):
            part._clock = self.clock.monotonic
        reporter = asyncio.create_task(report_forever(self.state.common, self.config.log_interval_s))
        clients = [asyncio.create_task(self._client(number)) for number in range(self._rng.choice([3, 6, 9]))]
        closing = asyncio.create_task(self._close_early()) if self.closes_early else None
        await asyncio.gather(*clients)
        if closing is not None:
            await closing
        await self._check_end()
        reporter.cancel()
        await self.state.common.close()
        await self.client.close()
        await asyncio.gather(reporter, return_exceptions=True)
        await asyncio.sleep(1)  # what was cancelled ends
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks that nobody ended: {left}"

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client {self.seed} {number}")
        for turn in range(rng.choice([1, 2, 3])):
            await asyncio.sleep(rng.choice([0, 0, 0.05, 1, 8]))
            what = rng.choice([generate] * 12 + [talk, talk, look, look, pause] + self.operations)
            await what(self, rng, f"c{number}-{turn}")

    async def _close_early(self) -> None:
        """What a second signal does: nobody is waited for."""
        await asyncio.sleep(self._rng.choice([0.1, 1, 4]))
        self.note("the server closes")
        self.has_closed = self.state.lifecycle.is_draining = True
        self.codes |= LOST
        await self.client.close()

    # ---- what must be true

    def _check_books(self, host: SimulatedHost) -> None:
        """After each turn of an engine."""
        engine = host.engine
        cache, scheduler = engine.cache, engine.scheduler
        assert cache.check() == []
        stats = engine.stats()
        held = {page for sequence in scheduler.running for page in sequence.table.pages}
        assert stats.num_free_pages + stats.num_cached_pages + len(held) == stats.num_pages
        waiting = [
            *scheduler.queue.candidates(),
            *scheduler.running,
            *engine.preparing.grammars.waiting,
            *engine.preparing.replays.waiting,
        ]
        assert sorted(one.request.id for one in waiting) == sorted(engine._sequences)
        unsent = {delta.id for delta in engine._ended}
        if not host.loop._is_closed:
            assert set(host.loop._live) == set(engine._sequences) | unsent
        if host.epoch == host.around.client._epoch:
            assert set(engine._sequences) <= host.wanted, "work for somebody who has left"
        slots = [one.slot for one in scheduler.running] + scheduler._free_slots
        assert sorted(slots) == list(range(engine.rows._runner.capacity().max_rows))

    async def _check_end(self) -> None:
        """Nobody is here any more: nothing is left of anybody, and the books agree with the clients'."""
        async with asyncio.timeout(LIMIT_S):
            while not (self.has_closed or self._is_quiet()):
                await asyncio.sleep(1)
        await asyncio.sleep(200)
        metrics = self.send("GET", "/metrics")
        await metrics.wait()
        found = parse_metrics(metrics.text)
        for around in self.arounds:
            assert (around.client._streams._streams, around.client._streams._calls) == ({}, {})
        assert (self.state._running, self.state._loading, len(self.state.recordings)) == ({}, {}, 0)
        assert (len(self.state.sessions), self.state.sessions.num_tokens) == (0, 0)
        assert self.state.recordings._num_bytes == 0
        self._check_accounts()
        self._check_tally(found)
        if not self.has_closed:
            for around in self.arounds:
                engine = around.hosts[-1].engine
                assert (engine._sequences, engine.preparing.num_sequences, engine.cache._open) == ({}, 0, {})
                assert engine.cache.num_available == engine.cache.pool.num_pages
            assert [replica.load for replica in self.client.replicas] == [0] * len(self.client.replicas)
            assert (found["num_running_reqs"], found["num_queue_reqs"], found["num_used_tokens"]) == (0, 0, 0)

    def _is_quiet(self) -> bool:
        are_idle = all(
            around.client.health.state == "healthy" and around.hosts[-1].is_idle and not around.client._streams.is_busy
            for around in self.arounds
        )
        return are_idle and not self.state.recordings._running

    def _check_accounts(self) -> None:
        for account in self.state.quotas._accounts.values():
            assert (account._num_running, account._num_held, account.num_visitors) == (0, 0, 0)

    def _check_tally(self, found: dict[str, float]) -> None:
        """What the server counted is what clients saw, and at most so much more as they did not wait for."""
        tally = self.tally
        counted = {name: found[f"num_requests_total[{name}]"] for name in ("stop", "length", "abort", "error")}
        room = tally.num_unknown
        for name in ("stop", "length", "abort"):
            seen = tally.finishes[name]
            assert seen <= counted[name] <= seen + room, (name, counted, tally.__dict__)
        assert sum(counted.values()) <= sum(tally.finishes.values()) + room, (counted, tally.__dict__)
        assert found["generation_tokens_total"] >= tally.tokens
        if not room and not tally.finishes["abort"]:
            assert found["generation_tokens_total"] == tally.tokens
            assert found["prompt_tokens_total"] == tally.prompt_tokens
        responses = sum(count for name, count in found.items() if name.startswith("http_responses_total"))
        assert responses == tally.num_exchanges - 1, "the request for the metrics is not answered yet"


def _draw_faults(rng: random.Random) -> Faults:
    def rate(*of: float) -> float:
        return rng.choice([0.0, 0.0, *of])

    return Faults(
        freeze=rate(0.05),
        late=rate(0.1, 0.5),
        jump=rate(0.01, 0.05),
        death=rng.choice([0.0] * 5 + [0.02, 0.1]),
        false_start=rate(0.3),
        leave=rate(0.4, 0.8),
        stall=rate(0.3),
        abort=rate(0.3),
    )
