"""Measures the time that tureen itself adds to the model's: the engine's Python a step, and the way over HTTP."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec

from tureen.app.application import build_app
from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.bench.report import Spread, spread
from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.runner import Batch, Capacity, Masks, StepOutput
from tureen.contract.types import EngineInfo, GenerateRequest
from tureen.engine.engine import Engine
from tureen.http.server import Server
from tureen.log import Progress
from tureen.runner.fake import FakeRunner
from tureen.server import SWITCH_INTERVAL_S, fastest_event_loop
from tureen.serving.client import EngineClient
from tureen.serving.inproc import InprocClient
from tureen.text.tokenizer import Tokenizer

RUNNING = (1, 16, 64)
PROMPT_LEN = 128
OUTPUT_LEN = 512
STEPS = 100
REQUESTS = 300
WARM_UP = 50
CAPACITY = Capacity(num_pages=4096, page_size=16, max_rows=64, vocab_size=49152, context_len=8192)


class TimedFakeRunner(FakeRunner):
    """A fake runner that knows how long its own last step took: that is not the engine's time."""

    last_run_s = 0.0

    def run(self, batch: Batch, masks: Masks | None = None) -> StepOutput:
        start = time.perf_counter()
        output = super().run(batch, masks)
        self.last_run_s = time.perf_counter() - start
        return output


class EngineOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one decode step of `running` sequences: plan, commit and detokenize, without the runner."""

    running: int
    step_ms: Spread


class HttpOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a request for one token over a kept connection, and of the same request without HTTP."""

    http_ms: Spread
    direct_ms: Spread
    added_p50_ms: float


def engine_overhead(tokenizer: Tokenizer) -> list[EngineOverhead]:
    """Returns median and tail of the engine's own time a step, for several numbers of sequences."""
    return [_engine_overhead(tokenizer, running) for running in RUNNING]


def _engine_overhead(tokenizer: Tokenizer, running: int) -> EngineOverhead:
    runner = TimedFakeRunner(CAPACITY)
    engine = Engine(runner, tokenizer, eos_token_ids=(), token_budget=512)
    dice = random.Random(running)
    for index in range(running):
        engine.add(make_request(f"r{index}", dice, output_len=OUTPUT_LEN))
    while runner.num_tokens < running * (PROMPT_LEN + 1):  # all prompts are computed
        engine.step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        deltas = engine.step()
        times.append(time.perf_counter() - start - runner.last_run_s)
        if len(deltas) != running:
            raise BenchError(f"a step with {running} sequences gave {len(deltas)} deltas")
    return EngineOverhead(running=running, step_ms=spread(times))


def http_overhead(tokenizer: Tokenizer) -> HttpOverhead:
    """Sends requests for one token in turns, over HTTP and directly, all in one event loop; returns both times."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=fastest_event_loop()) as runner:
        return runner.run(_http_overhead(tokenizer))


async def _http_overhead(tokenizer: Tokenizer) -> HttpOverhead:
    client = InprocClient(lambda progress: _fake_engine(tokenizer, progress))
    await client.start()
    listening = socket.create_server(("127.0.0.1", 0))
    config = Config()
    server = Server(build_app(client, tokenizer, config), config, lambda: None)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    connection = ClientConnection(Address(f"http://127.0.0.1:{listening.getsockname()[1]}"))
    dice = random.Random(1)
    try:
        over_http, direct = [], []
        for index in range(REQUESTS + WARM_UP):
            over_http.append(await _timed(lambda: _ask_over_http(connection, dice)))
            direct.append(await _timed(lambda: _ask_directly(client, f"direct-{index}", dice)))  # noqa: B023
    finally:
        connection.close()
        server.should_exit = True
        await serving
        await client.close()
    over_http, direct = over_http[WARM_UP:], direct[WARM_UP:]
    added = statistics.median(over_http) - statistics.median(direct)
    return HttpOverhead(http_ms=spread(over_http), direct_ms=spread(direct), added_p50_ms=round(1000 * added, 3))


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def _ask_over_http(connection: ClientConnection, dice: random.Random) -> None:
    request = make_request("", dice, output_len=1, prompt_len=8)
    params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    body = msgspec.json.encode({"input_ids": request.token_ids, "sampling_params": params})
    status, answer = await connection.request("POST", "/generate", body)
    if status != 200:
        raise BenchError(f"/generate: HTTP {status}: {answer[:300]!r}")


async def _ask_directly(client: EngineClient, request_id: str, dice: random.Random) -> None:
    async for _ in client.generate(make_request(request_id, dice, output_len=1, prompt_len=8)):
        pass


def _fake_engine(tokenizer: Tokenizer, progress: Progress) -> tuple[Engine, EngineInfo]:
    progress("fake model", 1, 1)
    return Engine(FakeRunner(CAPACITY), tokenizer, eos_token_ids=()), fake_info()


def fake_info() -> EngineInfo:
    """Returns the facts about an engine without a model."""
    return EngineInfo(
        model_path="fake",
        model_name="fake",
        architecture="none",
        model_type="none",
        device="none",
        dtype="none",
        vocab_size=CAPACITY.vocab_size,
        context_len=CAPACITY.context_len,
        max_total_tokens=CAPACITY.num_pages * CAPACITY.page_size,
        page_size=CAPACITY.page_size,
        hidden_size=CAPACITY.hidden_size,
        kv_bytes_per_token=0,
        max_running_requests=CAPACITY.max_rows,
        eos_token_ids=(),
    )


def make_request(
    request_id: str, dice: random.Random, *, output_len: int, prompt_len: int = PROMPT_LEN
) -> GenerateRequest:
    """Makes a greedy request of random tokens, whose output is exactly `output_len` long."""
    return GenerateRequest(
        id=request_id,
        token_ids=tuple(dice.randrange(1000, 40000) for _ in range(prompt_len)),
        params=SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output_len),
        max_new_tokens=output_len,
        seed=0,
    )
