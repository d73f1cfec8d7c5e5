"""Embeddings as prompts, and hidden states, through the engine, against transformers."""

import os

import numpy as np
import pytest
import torch
from byte_tokenizer import make_byte_tokenizer
from runner_driver import folder_source, random_tokens
from tiny_models import VARIANTS, greedy, write

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import NO_TOKEN, GenerateRequest
from tureen.engine.engine import Engine
from tureen.runner.load import load_runner

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
FAMILIES = ("llama-tied", "mistral-sliding", "qwen2", "qwen3", "gemma3")
PROMPT = tuple(random_tokens(37, 11))
NEW_TOKENS = 9
CLOSE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    assert request.param in VARIANTS
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write(folder, request.param)


def make_engine(folder, *, page_size=4, max_total_tokens=512, budget=512, **options):
    config = Config(
        device=DEVICE, dtype="float32", page_size=page_size, max_total_tokens=max_total_tokens, num_threads=1
    )
    runner = load_runner(folder_source(folder), config)
    return Engine(runner, make_byte_tokenizer(), eos_token_ids=(), token_budget=budget, **options)


def make_request(name="a", token_ids=PROMPT, max_new_tokens=NEW_TOKENS, **fields):
    params = SamplingParams(temperature=0.0)
    return GenerateRequest(id=name, token_ids=token_ids, params=params, max_new_tokens=max_new_tokens, seed=1, **fields)


def embedded(oracle, name="e", prompt=PROMPT, **fields):
    """The request whose prompt is what the oracle embeds these tokens to."""
    with torch.no_grad():
        vectors = oracle.get_input_embeddings()(torch.tensor(prompt)).float().numpy()
    return make_request(name, (NO_TOKEN,) * len(prompt), embeds=vectors.tobytes(), **fields)


def run(engine, *requests):
    """Token ids, hidden states [positions, hidden size] and the last usage of each request."""
    tokens, states, usage = {}, {}, {}
    for request in requests:
        engine.add(request)
        tokens[request.id], states[request.id] = [], []
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish is None or delta.finish.type == "length", delta.finish
            tokens[delta.id] += delta.token_ids
            states[delta.id] += [np.frombuffer(one, np.float32) for one in delta.hidden_states]
            usage[delta.id] = delta.usage
    assert engine.cache.check() == []
    return tokens, states, usage


@torch.no_grad()
def expected_states(oracle, token_ids):
    return oracle(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0].numpy()


@pytest.mark.parametrize("budget", [512, 5])
def test_hidden_states_of_prompt_and_output_equal_transformers(model, budget):
    folder, oracle = model
    tokens, states, _ = run(make_engine(folder, budget=budget), make_request(hidden_states="all"))
    assert tokens["a"] == greedy(oracle, list(PROMPT), NEW_TOKENS, draft=tokens["a"])
    expected = expected_states(oracle, [*PROMPT, *tokens["a"][:-1]])
    assert np.abs(np.stack(states["a"]) - expected).max() < CLOSE


def test_the_last_hidden_state_is_that_of_the_last_position(model):
    folder, oracle = model
    tokens, states, _ = run(make_engine(folder), make_request(hidden_states="last"))
    [state] = states["a"]
    assert np.abs(state - expected_states(oracle, [*PROMPT, *tokens["a"][:-1]])[-1]).max() < CLOSE


def test_hidden_states_of_a_prompt_alone(model):
    folder, oracle = model
    request = make_request(max_new_tokens=0, hidden_states="all")
    last = make_request("b", max_new_tokens=0, hidden_states="last")
    _, states, _ = run(make_engine(folder), request, last)
    expected = expected_states(oracle, PROMPT)
    assert np.abs(np.stack(states["a"]) - expected).max() < CLOSE
    assert np.abs(states["b"][0] - expected[-1]).max() < CLOSE
    assert len(states["b"]) == 1


def test_the_pooled_state_is_the_mean_over_the_prompt_whatever_is_cached_and_however_it_is_cut(model):
    folder, oracle = model
    request = make_request(max_new_tokens=0, hidden_states="pooled")
    engine = make_engine(folder)
    run(engine, make_request("first"))
    _, states, usage = run(engine, request)
    [pooled] = states["a"]
    assert usage["a"].cached_tokens == 0
    assert np.abs(pooled - expected_states(oracle, PROMPT).mean(axis=0)).max() < CLOSE
    _, in_pieces, _ = run(make_engine(folder, budget=5), request)
    assert np.abs(in_pieces["a"][0] - pooled).max() < CLOSE


def test_an_aborted_prompt_has_no_pooled_state(model):
    engine = make_engine(model[0], budget=5)
    engine.add(make_request(max_new_tokens=0, hidden_states="pooled"))
    engine.step()
    engine.abort("a")
    [last] = [delta for delta in engine.step() if delta.finish is not None]
    assert last.hidden_states == ()


def test_a_cached_prompt_still_gives_all_of_its_hidden_states(model):
    folder, oracle = model
    engine = make_engine(folder)
    run(engine, make_request("first"))
    _, states, usage = run(engine, make_request(hidden_states="all"))
    assert usage["a"].cached_tokens == 0
    assert np.abs(np.stack(states["a"])[: len(PROMPT)] - expected_states(oracle, PROMPT)).max() < CLOSE
    _, _, usage = run(engine, make_request(hidden_states="last"))
    assert usage["a"].cached_tokens > 0


@pytest.mark.parametrize("budget", [512, 5])
def test_embeddings_of_tokens_give_the_output_of_the_tokens(model, budget):
    folder, oracle = model
    tokens, _, usage = run(make_engine(folder, budget=budget), embedded(oracle))
    assert tokens["e"] == greedy(oracle, list(PROMPT), NEW_TOKENS, draft=tokens["e"])
    assert usage["e"].prompt_tokens == len(PROMPT)


def test_embeddings_that_are_no_tokens_equal_transformers(model):
    folder, oracle = model
    with torch.no_grad():
        vectors = torch.from_numpy(np.random.default_rng(3).normal(0, 0.3, (20, 64)).astype(np.float32))
        logits = oracle(inputs_embeds=vectors[None]).logits[0, -1]
    request = make_request("e", (NO_TOKEN,) * 20, max_new_tokens=1, embeds=vectors.numpy().tobytes())
    tokens, _, _ = run(make_engine(folder), request)
    assert tokens["e"] == [int(logits.argmax())]


def test_embeddings_are_never_cached(model):
    folder, oracle = model
    engine = make_engine(folder)
    for _ in range(2):
        _, _, usage = run(engine, embedded(oracle))
        assert usage["e"].cached_tokens == 0
        assert engine.stats().num_cached_pages == 0
    tokens, _, usage = run(engine, make_request())
    assert usage["a"].cached_tokens == 0
    assert tokens["a"] == greedy(oracle, list(PROMPT), NEW_TOKENS, draft=tokens["a"])


def test_preempted_requests_with_embeddings_or_hidden_states_go_on_as_if_nothing_had_been(model):
    folder, oracle = model
    engine = make_engine(folder, max_total_tokens=120)
    prompts = [PROMPT[start : start + 20] for start in (0, 5, 9)]
    requests = [
        embedded(oracle, "e0", prompts[0], max_new_tokens=40),
        make_request("h1", prompts[1], max_new_tokens=40, hidden_states="all"),
        embedded(oracle, "e2", prompts[2], max_new_tokens=40, hidden_states="all"),
    ]
    tokens, states, _ = run(engine, *requests)
    assert engine.stats().total_preemptions > 0
    for name, prompt in zip(("e0", "h1", "e2"), prompts, strict=True):
        assert tokens[name] == greedy(oracle, list(prompt), 40, draft=tokens[name])
    for name, prompt in (("h1", prompts[1]), ("e2", prompts[2])):
        expected = expected_states(oracle, [*prompt, *tokens[name][:-1]])
        assert np.abs(np.stack(states[name]) - expected).max() < CLOSE


def test_requests_with_embeddings_share_a_batch_with_others(model):
    folder, oracle = model
    requests = [make_request(), embedded(oracle, prompt=PROMPT[3:17]), make_request("b", PROMPT[::-1])]
    tokens, _, _ = run(make_engine(folder, budget=16), *requests)
    assert tokens["a"] == greedy(oracle, list(PROMPT), NEW_TOKENS, draft=tokens["a"])
    assert tokens["e"] == greedy(oracle, list(PROMPT[3:17]), NEW_TOKENS, draft=tokens["e"])
    assert tokens["b"] == greedy(oracle, list(PROMPT[::-1]), NEW_TOKENS, draft=tokens["b"])
