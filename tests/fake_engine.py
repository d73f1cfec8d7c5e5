"""Engines over the fake runner that do what the prompt says; a child process can build them by name.

"say:héllo" answers "héllo" and EOS. Any other prompt gets letters that depend on prompt and seed, without end.
A drawn byte 1 makes the next step's numbers of that sequence wrong; a request with the salt "die" kills the engine,
and one with the salt "abort" its process.
"""

from __future__ import annotations

import os

from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from inline_compiler import InlineCompiler
from warm_structs import is_warm

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.runner import Capacity, Row, SlotState
from tureen.contract.types import EngineInfo, GenerateRequest, OutputDelta
from tureen.engine.engine import Engine
from tureen.engine.queue import Schedule
from tureen.errors import StartupError
from tureen.grammar import regex_nodes
from tureen.log import Progress, no_progress
from tureen.runner.fake import FakeRunner
from tureen.struct_warm_up import imported_structs

SAY = b"say:"
PAGES, PAGE_SIZE, CONTEXT_LEN, MAX_ROWS = 256, 16, 2048, 16
HIDDEN_SIZE = 4
POISON_TOKEN = 1
SLOW_STEP_S = 0.01


class WaitingCompiler(InlineCompiler):
    """Compiles nothing while `is_held`."""

    is_held = True

    @property
    def is_asked(self) -> bool:
        return bool(self._pending)

    def poll(self) -> None:
        if not self.is_held:
            super().poll()


class DyingEngine(Engine):
    """Its fourth step with a request of the salt "die" raises, and of the salt "abort" aborts.

    The operation "cold_structs" names the Structs that msgspec has no information on.
    """

    num_steps_to_live = 3

    def call(self, op: str, **args: object) -> object:
        if op == "cold_structs":
            kinds = [kind for kind in imported_structs() if kind.__module__ != regex_nodes.__name__]  # never decoded
            return [kind.__name__ for kind in kinds if not is_warm(kind)]
        return super().call(op, **args)

    def step(self) -> list[OutputDelta]:
        salts = {sequence.request.cache_salt.strip() for sequence in self._sequences.values()}
        if salts & {"die", "abort"}:
            self.num_steps_to_live -= 1
            if self.num_steps_to_live < 0 and "abort" in salts:
                os.abort()  # as a fault in native code does
            if self.num_steps_to_live < 0:
                raise RuntimeError("scripted death")
        return super().step()


def choose(token_id: int, state: SlotState, outputs: list[int]) -> int:
    prompt = bytes(byte for byte in state.prompt_ids if 0 <= byte < 256)
    if not prompt.startswith(SAY):
        return ord("a") + token_id % 26
    script = prompt[len(SAY) :]
    return script[len(outputs)] if len(outputs) < len(script) else EOS


def fault(_: int, row: Row) -> str | None:
    return "poison" if row.start and row.token_ids == (POISON_TOKEN,) else None


def make_engine(
    config: Config | None = None, *, progress: Progress = no_progress, step_s: float = 0.0
) -> tuple[Engine, EngineInfo]:
    config = config or Config()
    progress("load weights", 1, 1)
    capacity = Capacity(PAGES, PAGE_SIZE, MAX_ROWS, VOCAB_SIZE, CONTEXT_LEN, hidden_size=HIDDEN_SIZE)
    engine = DyingEngine(
        FakeRunner(capacity, choose=choose, fault=fault, step_s=step_s),
        make_byte_tokenizer(),
        eos_token_ids=(EOS,),
        max_queued=config.max_queued_requests,
        token_budget=config.chunked_prefill_size,
        schedule=Schedule(config.schedule_policy, config.enable_priority_scheduling),
        compiler=None if config.grammar_backend == "none" else InlineCompiler(),
    )
    info = EngineInfo(
        model_path="fake",
        model_name="fake-model",
        architecture="Fake",
        model_type="fake",
        device="fake",
        dtype="none",
        vocab_size=VOCAB_SIZE,
        context_len=CONTEXT_LEN,
        max_total_tokens=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        hidden_size=capacity.hidden_size,
        kv_bytes_per_token=8,
        max_running_requests=MAX_ROWS,
        eos_token_ids=(EOS,),
        bos_token_id=257,
    )
    return engine, info


def make_slow_engine(config: Config | None = None, *, progress: Progress = no_progress) -> tuple[Engine, EngineInfo]:
    """Ten milliseconds a step."""
    return make_engine(config, progress=progress, step_s=SLOW_STEP_S)


def make_slow_compiling_engine(
    config: Config | None = None, *, progress: Progress = no_progress
) -> tuple[Engine, EngineInfo]:
    """The same with a compiler that waits."""
    engine, info = make_slow_engine(config, progress=progress)
    engine.preparing.grammars._compiler = WaitingCompiler()
    return engine, info


def refuse_to_start(config: Config | None = None, *, progress: Progress = no_progress) -> tuple[Engine, EngineInfo]:
    raise StartupError("the model is missing; use --model-path")


def crash_at_start(config: Config | None = None, *, progress: Progress = no_progress) -> tuple[Engine, EngineInfo]:
    raise ValueError("a secret detail")


def run_out_of_memory(config: Config | None = None, *, progress: Progress = no_progress) -> tuple[Engine, EngineInfo]:
    raise MemoryError("std::bad_alloc")


def make_request(request_id: str, text: str = "a", *, max_new_tokens: int = 20, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        token_ids=tuple(text.encode()),
        params=SamplingParams(max_new_tokens=max_new_tokens),
        max_new_tokens=max_new_tokens,
        seed=1,
        **fields,
    )
