"""Models whose layers keep a state or have a window, in the real engine: the prefix cache, preemption and batching
change no bit."""

from __future__ import annotations

import random

import msgspec
import pytest
from byte_tokenizer import make_byte_tokenizer
from patient_disk import wait_for_disks
from runner_driver import folder_source, random_tokens
from samples import either
from tiny_models import write

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest, LogprobSpec
from tureen.engine.engine import Engine
from tureen.kv_offload.attach import attach
from tureen.models import segments, stages
from tureen.runner.load import load_runner
from tureen.runner.loading import describe
from tureen.weights.source import model_config

SPEC = LogprobSpec(prompt_start=0, top=3)
RECURRENT = ("lfm2", "qwen3-5", "qwen3-next", "granite4-h-moe", "nemotron-h", "falcon-h1", "kimi-linear")
WITH_WINDOWS = ("gemma3", "gemma3n", "gemma4-shared", "gpt-oss", "mistral-sliding")
"""Their windows are 10 or 12 tokens. All layers of the last one have a window."""


@pytest.fixture(scope="module", params=[*RECURRENT, *WITH_WINDOWS])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, request.param)
    return folder


def make_engine(
    folder, kernels, *, max_total_tokens=4096, token_budget=16, prefix_cache=True, attention="auto", kv_disk=None
):
    config = Config(
        device="cpu",
        dtype="float32",
        page_size=16,
        kernels=kernels,
        attention_backend=attention,
        num_threads=2,
        max_total_tokens=max_total_tokens,
        max_running_requests=4,
        chunked_prefill_size=token_budget,
        kv_disk=kv_disk,
    )
    runner = load_runner(folder_source(folder), config)
    tokenizer = make_byte_tokenizer()
    engine = Engine(runner, tokenizer, eos_token_ids=(2,), token_budget=token_budget, prefix_cache=prefix_cache)
    if kv_disk is not None:
        attach(engine, runner, config, tokenizer.all_token_bytes())
    return engine


def make_request(name, tokens, count, *, seed=0, logprobs=SPEC):
    params = SamplingParams(temperature=0.0 if seed == 0 else 0.9, ignore_eos=True)
    return GenerateRequest(
        id=name, token_ids=tuple(tokens), params=params, max_new_tokens=count, seed=seed, logprobs=logprobs
    )


def run(engine, *requests):
    """Return of each request its tokens, its log-probabilities, and the number of cached tokens."""
    for request in requests:
        engine.add(request)
    answers = {request.id: ([], [], []) for request in requests}
    while engine.has_work or engine.is_preparing:
        if engine.is_preparing:
            engine.prepare()
        for delta in engine.step():
            tokens, logprobs, cached = answers[delta.id]
            tokens += delta.token_ids
            logprobs += [*delta.prompt_logprobs, *delta.output_logprobs]
            if delta.usage is not None:
                cached.append(delta.usage.cached_tokens)
    return [answers[request.id] for request in requests]


@pytest.mark.parametrize("name", RECURRENT)
def test_ranks_and_stages_refuse_a_model_whose_layers_keep_states(name, tmp_path):
    write(tmp_path, name)
    config = describe(model_config(folder_source(tmp_path)))
    for why in (segments.why_not(config, 2), stages.why_not(config, 2)):
        assert "recurrent layers" in why


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_ten_turns_are_the_same_with_and_without_the_prefix_cache_and_compute_only_what_is_new(folder, kernels):
    """In the gate, torch takes three turns: its kernels compute a turn many times slower."""
    num_turns = 10 if kernels == "native" else either(10, 3)
    cached, cold = (make_engine(folder, kernels, prefix_cache=is_on) for is_on in (True, False))
    tokens = random_tokens(40, 1, 250)
    for turn in range(num_turns):
        plain = make_request(f"turn {turn}", tokens, 9, logprobs=LogprobSpec(prompt_start=-1, top=3))
        [(answer, logprobs, [*_, num_cached])] = run(cached, plain)
        [(again, others, [*_, none])] = run(cold, plain)
        assert (answer, logprobs, none) == (again, others, 0)
        assert num_cached >= (len(tokens) - 5 - 16 if turn else 0)
        tokens += [*answer, *random_tokens(5, turn, 250)]
    cached.close()
    cold.close()


@pytest.mark.parametrize(
    ("name", "kernels", "num_turns"),
    [
        *((name, "native", 10) for name in (*RECURRENT, *WITH_WINDOWS)),
        *((name, "torch", 3) for name in ("lfm2", "qwen3-5", "gemma3", "mistral-sliding")),
    ],
)
def test_each_turn_in_a_new_engine_that_finds_states_and_windows_on_the_disk_computes_only_what_is_new(
    name, kernels, num_turns, tmp_path, monkeypatch
):
    wait_for_disks(monkeypatch)
    write(tmp_path, name)
    cold = make_engine(tmp_path, kernels, prefix_cache=False)
    tokens = random_tokens(40, 1, 250)
    for turn in range(num_turns):
        kept = make_engine(tmp_path, kernels, kv_disk=str(tmp_path / "kv"))
        assert kept.cache.windows.is_used == (name in WITH_WINDOWS)
        plain = make_request(f"turn {turn}", tokens, 9, logprobs=LogprobSpec(prompt_start=-1, top=3))
        [(answer, logprobs, [*_, num_cached])] = run(kept, plain)
        assert (answer, logprobs) == run(cold, plain)[0][:2]
        assert num_cached == ((len(tokens) - 6) // 16 * 16 if turn else 0)
        tokens += [*answer, *random_tokens(5, turn, 250)]
        kept.close()
    cold.close()


def test_requests_that_are_preempted_and_run_in_a_batch_get_the_bits_that_they_get_alone(folder):
    rng = random.Random(7)
    system = random_tokens(20, 3, 250)
    requests = [
        make_request(f"r{index}", [*system, *random_tokens(rng.randrange(1, 20), index, 250)], 90, seed=index)
        for index in range(8)
    ]
    alone = make_engine(folder, "native", token_budget=512, prefix_cache=False)
    expected = [run(alone, request)[0][:2] for request in requests]
    crowded = make_engine(folder, "native", max_total_tokens=256, token_budget=23)
    found = [answer[:2] for answer in run(crowded, *requests)]
    assert crowded.scheduler.num_preemptions > 0
    assert found == expected
    alone.close()
    crowded.close()


@pytest.mark.parametrize("name", ["lfm2", "qwen3-5", "gemma3", "mistral-sliding"])
def test_requests_that_are_preempted_while_states_or_windows_go_to_the_disk_and_back_get_the_bits_that_they_get_alone(
    name, tmp_path, monkeypatch
):
    wait_for_disks(monkeypatch)
    write(tmp_path, name)
    system = random_tokens(40, 3, 250)
    requests = [make_request(f"r{n}", [*system, *random_tokens(n, n, 250)], 60, seed=n) for n in range(1, 6)]
    plain = [msgspec.structs.replace(each, logprobs=LogprobSpec(prompt_start=-1, top=3)) for each in requests]
    alone = make_engine(tmp_path, "native", token_budget=512, prefix_cache=False)
    expected = [run(alone, request)[0][:2] for request in plain]
    for life in range(3):
        crowded = make_engine(tmp_path, "native", max_total_tokens=256, token_budget=23, kv_disk=str(tmp_path / "kv"))
        answers = run(crowded, *plain)
        assert [answer[:2] for answer in answers] == expected
        assert crowded.scheduler.num_preemptions > 0
        assert life == 0 or max(cached[-1] for _, _, cached in answers) >= 32
        crowded.close()
    alone.close()


def test_pages_of_a_cache_with_window_pages_are_not_those_of_one_without(tmp_path, monkeypatch):
    wait_for_disks(monkeypatch)
    write(tmp_path, "gemma3")
    plain = make_request("r", random_tokens(40, 1, 250), 9, logprobs=None)
    found = []
    for max_total_tokens in (64, 4096, 64, 4096):
        engine = make_engine(tmp_path, "native", max_total_tokens=max_total_tokens, kv_disk=str(tmp_path / "kv"))
        assert engine.cache.windows.is_used == (max_total_tokens > 64)
        found.append(run(engine, plain)[0])
        assert engine.stats().kv_disk.total_damaged == 0
        engine.close()
    assert [cached for _, _, [*_, cached] in found] == [0, 0, 32, 32]
    assert len({tuple(tokens) for tokens, _, _ in found}) == 1


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_a_sequence_holds_window_pages_for_its_window_alone(name, tmp_path):
    write(tmp_path, name)
    engine = make_engine(tmp_path, "native")
    engine.add(make_request("r", random_tokens(100, 1, 250), 100))
    most = 0
    while engine.has_work:
        engine.step()
        most = max([most, *(len(sequence.table.live.pages) for sequence in engine.scheduler.running)])
    assert most == 2  # of 16 tokens: those of the window may lie in two
    engine.close()
