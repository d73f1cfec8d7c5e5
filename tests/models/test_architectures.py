import functools
import json
import os
import random
import warnings

import mutated
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from runner_driver import PROMPT, Running, distance, folder_source, generate, step
from tiny_models import VARIANTS, greedy, logprobs, write

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.errors import StartupError
from tureen.layers.rope import RopeConfig
from tureen.registry import declared
from tureen.runner import loading
from tureen.runner.load import load_runner
from tureen.weights.stored import Stored, to_float32

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
CLOSE = 1e-4
SPEC = LogprobSpec(prompt_start=0, top=256)


BEGINNING = PROMPT[:24]
"""Longer than the windows, so a mutation that changes the whole prompt changes this part."""
MUTATED = {
    "LlamaForCausalLM": "llama-biases",
    "MistralForCausalLM": "mistral-sliding",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2-sliding",
    "Qwen2MoeForCausalLM": "qwen2-moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3-moe",
    "Gemma2ForCausalLM": "gemma2-softcaps",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
}
"""By architecture, the variant with the most parts."""


@pytest.fixture(scope="module", params=VARIANTS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write(folder, request.param)


def make_runner(folder, *, page_size=16, kernels="auto", **settings):
    config = Config(
        device=DEVICE,
        dtype="float32",
        page_size=page_size,
        max_total_tokens=1024,
        num_threads=1,
        kernels=kernels,
        **settings,
    )
    return load_runner(folder_source(folder), config)


def shuffled_pages(runner, seed=0):
    pages = list(range(runner.capacity().num_pages))
    random.Random(seed).shuffle(pages)
    return pages


def check_parity(runner, oracle, prompt, pages, *, count, chunk=1000):
    """Compare greedy tokens and all log-probabilities with those of transformers."""
    sequence = Running(0, prompt, pages, logprobs=SPEC)
    tokens = generate(runner, sequence, count, chunk=chunk, score=True)
    assert tokens == greedy(oracle, prompt, count, draft=tokens)
    expected = logprobs(oracle, sequence.token_ids[:-1])
    reports = sequence.prompt_logprobs + sequence.output_logprobs
    assert len(sequence.prompt_logprobs) == len(prompt) - 1
    assert max(distance(report, row) for report, row in zip(reports, expected.tolist(), strict=True)) < CLOSE


@pytest.mark.parametrize(
    ("page_size", "chunk", "kernels"),
    [(16, 1000, "auto"), (16, 7, "auto"), (1, 16, "torch"), (1, 1, "auto"), (4, 33, "torch")],
)
def test_greedy_tokens_and_all_logprobs_equal_transformers(model, page_size, chunk, kernels):
    folder, oracle = model
    runner = make_runner(folder, page_size=page_size, kernels=kernels)
    check_parity(runner, oracle, PROMPT, shuffled_pages(runner)[: -(-100 // page_size)], count=12, chunk=chunk)


def mutations(config):
    """Yield a name of the mutation, the changed config, and the kind of weights that get noise."""
    for kind in mutated.kinds(config.weights()):
        yield kind, config, kind
    for window in dict.fromkeys(config.windows):
        other = len(BEGINNING) // 2 if window is None else window + 1
        windows = tuple(other if one == window else one for one in config.windows)
        yield f"window {window}", replace(config, windows=windows), None
    for rope in dict.fromkeys(config.ropes):
        other = RopeConfig(theta=10000.0) if rope is None else replace(rope, theta=1.05 * rope.theta)
        ropes = tuple(other if one == rope else one for one in config.ropes)
        yield f"rope {rope}", replace(config, ropes=ropes), None


def with_noise(weights, kind):
    for stored in weights:
        if mutated.kind(stored.name) == kind:
            values = mutated.with_noise(to_float32(stored))
            stored = Stored(stored.name, stored.shape, "F32", values.reshape(-1).view(np.uint8))
        yield stored


def remembering(oracle):
    """Return the oracle, which computes the same tokens only once."""
    outputs = functools.cache(lambda token_ids: oracle(torch.tensor([token_ids])))
    return lambda token_ids, logits_to_keep: outputs(tuple(token_ids[0].tolist()))


@pytest.mark.parametrize(
    ("architecture", "model", "kernels"),
    [*((name, variant, "auto") for name, variant in MUTATED.items()), ("Gemma3ForCausalLM", "gemma3", "torch")],
    indirect=["model"],
)
def test_noise_in_any_weight_another_window_and_another_rope_are_noticed(architecture, model, kernels, monkeypatch):
    folder, oracle = model[0], remembering(model[1])
    describe, weights = loading.describe, loading.weights
    config = describe(json.loads((folder / "config.json").read_text()))
    assert config.architecture == architecture
    check_parity(make_runner(folder, kernels=kernels), oracle, BEGINNING, range(2), count=1)
    unnoticed = []
    for name, changed, kind in mutations(config):
        monkeypatch.setattr(loading, "describe", lambda hf, changed=changed: changed)
        monkeypatch.setattr(loading, "weights", lambda *a, kind=kind, **more: with_noise(weights(*a, **more), kind))
        runner = make_runner(folder, kernels=kernels)
        try:
            check_parity(runner, oracle, BEGINNING, range(2), count=1)
        except AssertionError:
            continue
        unnoticed.append(name)
    assert unnoticed == []


def test_every_architecture_without_pictures_is_tested_with_noise():
    known = declared("tureen.models", "ARCHITECTURES")
    assert set(MUTATED) == {name for name in known if not name.endswith("ForConditionalGeneration")}


def test_rows_of_one_batch_do_not_mix(model):
    folder, oracle = model
    runner = make_runner(folder, page_size=4)
    pages = shuffled_pages(runner, 3)
    prompts = [PROMPT[start : start + length] for start, length in ((0, 1), (3, 20), (9, 33), (20, 41), (1, 5))]
    sequences = [Running(i, prompt, pages[20 * i : 20 * i + 20]) for i, prompt in enumerate(prompts)]
    chunks = (1, 8, 5, 50, 3)
    while len(sequences[2].output) < 6:
        step(runner, sequences, chunks)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == greedy(oracle, prompt, len(sequence.output), draft=sequence.output)


def test_a_config_in_the_older_style_means_the_same(model, tmp_path):
    folder, oracle = model
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config.pop("layer_types", None)
    if "full_attention" in parameters:
        pytest.skip("scaling of gemma3 is told apart in a test of its own")
    config |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    runner = make_runner(tmp_path)
    assert generate(runner, Running(0, PROMPT, range(8)), 4) == greedy(oracle, PROMPT, 4)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(StartupError, match=r"MambaForCausalLM.*Gemma3ForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load_runner(folder_source(tmp_path), Config(device=DEVICE))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("original", "context_length", "factors"),
    [(64, None, "short"), (64, 64, "short"), (48, 100, "long")],
)
def test_longrope_has_the_short_factors_unless_a_longer_context_is_asked_for(
    original, context_length, factors, kernels, tmp_path, caplog
):
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": original,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more = {"rope_parameters": parameters, "original_max_position_embeddings": original}
        oracle = write(tmp_path, "phi3-partial", **more)
    with caplog.at_level("INFO", "tureen"):
        runner = make_runner(tmp_path, context_length=context_length, kernels=kernels)
    assert runner.capacity().context_len == (context_length or original)
    assert runner.call("device")["rope_factors"] == factors
    [line] = [record.message for record in caplog.records if "LongRoPE" in record.message]
    assert f"its {factors} factors" in line
    assert "--context-length" in line
    sequence = Running(0, random.Random(5).choices(range(256), k=61), range(8), logprobs=SPEC)
    generate(runner, sequence, 2, chunk=1000 if factors == "short" else 50, score=True)
    expected = logprobs(oracle, sequence.token_ids[:-1])
    reports = sequence.prompt_logprobs + sequence.output_logprobs
    assert max(distance(report, row) for report, row in zip(reports, expected.tolist(), strict=True)) < CLOSE
