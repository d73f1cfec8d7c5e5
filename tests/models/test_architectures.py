import functools
import json
import os
import random
import warnings
from itertools import product

import converted_gguf
import mutated
import numpy as np
import pytest
import tiny_gguf
import torch
from msgspec.structs import replace
from runner_driver import PROMPT, Running, distance, generate, step
from safetensors.torch import load_file, save_file
from samples import some
from tiny_larger_models import LARGER, write_larger
from tiny_models import DEEPSEEK_YARN, VARIANTS, YARN, greedy, logprobs, write
from transformers import LlamaForCausalLM

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.errors import StartupError
from tureen.layers.mixers import Mamba2
from tureen.layers.rope import RopeConfig
from tureen.models.config import Multipliers
from tureen.registry import declared
from tureen.runner import loading
from tureen.runner.load import load_runner
from tureen.weights.source import open_model
from tureen.weights.stored import Stored, to_float32

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
CLOSE = 1e-4
WEIGHTS = "model.safetensors"
PARTS = ("gate", "up", "down")
SPEC = LogprobSpec(prompt_start=0, top=256)


TYPED = ("granitemoehybrid", "ministral", "lfm2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types of models whose configs have always had layer_types, or whose variants have others than the usual ones."""
NOT_IN_OLDER_STYLE = (
    *("gemma3", "gemma3n", "gemma4", "gemma4-shared", "gemma4-moe"),
    *("kimi-linear", "nemotron-h", "nemotron-h-moe"),
)
"""Variants without a rope, or with two ropes: gemma3 has its own test, the others have no older style."""
BEGINNING = PROMPT[:24]
"""Longer than the windows, so a mutation that changes the whole prompt changes this part."""
MUTATED = {f"{family.removesuffix('Text')}ForCausalLM": variant for variant, (family, _) in VARIANTS.items()}
"""By architecture, its last variant, which is the one with the most parts."""

ALL_SPARSE = {"mlp_only_layers": []}
HEAD_SCALE = {"query_pre_attn_scalar": 32}
NO_BIAS = {"attention_bias": False}
ONE_MSCALE = DEEPSEEK_YARN | {"mscale_all_dim": 0.7}
UNLIMITED = {"time_step_limit": [0.0, float("inf")]}
NO_BIAS_AT_ALL = dict.fromkeys(("mamba_proj_bias", "projectors_bias", "attention_bias"), False)
PLAIN_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
}
IN_GGUF = {
    "llama-rope-linear": {},
    "llama-rope-yarn": {},
    "mistral-sliding": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2-moe": ALL_SPARSE,
    "qwen3": {},
    "qwen3-moe": ALL_SPARSE,
    "gemma2-softcaps": HEAD_SCALE,
    "gemma3": HEAD_SCALE,
    "gemma3n": {"rope_parameters": PLAIN_ROPES},
    "gemma4": {},
    "gemma4-shared": {},
    "gemma4-moe": {},
    "granite": {},
    "phi3": {},
    "phi3-partial": {},
    "smollm3": {},
    "gemma": {},
    "olmo2": NO_BIAS,
    "olmo3": {},
    "olmoe": {},
    "glm": {},
    "glm4": {},
    "glm4-moe": {"n_group": 1, "topk_group": 1},
    "ernie4-5": {"use_bias": False},
    "ernie4-5-moe": {},
    "hunyuan": NO_BIAS,
    "hunyuan-moe": {},
    "exaone4": {},
    "seed-oss": {"attention_out_bias": False, "mlp_bias": False},
    "granite-moe": {},
    "granite-moe-shared": {},
    "granite4": {"position_embedding_type": None},
    "ministral3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    "minimax-m2": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {},
    "arcee": {"mlp_bias": False},
    "lfm2": {"conv_bias": False},
    "qwen3-next": {},
    "qwen3-5": {},
    "qwen3-5-moe": {},
    "gpt-oss": {},
    "deepseek-v2": {"rope_parameters": ONE_MSCALE},
    "deepseek-v2-groups": {},
    "deepseek-v3": {"rope_parameters": ONE_MSCALE},
    "kimi-linear": {},
    "glm4-moe-lite": {"rope_interleave": True},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "apertus": NO_BIAS,
    "phimoe": {"router_jitter_noise": 0.01},
    "falcon-h1": {"mamba_conv_bias": False},
    "falcon-h1-norm": NO_BIAS_AT_ALL | {"mamba_norm_before_gate": False},
    "granite4-h": UNLIMITED | {"intermediate_size": 80, "position_embedding_type": None, "attention_bias": True},
    "granite4-h-moe": UNLIMITED | {"mamba_proj_bias": False, "position_embedding_type": None},
    "nemotron-h": {},
    "nemotron-h-moe": {"layers_block_type": [*("mamba", "moe", "attention", "moe", "mamba", "moe")], "use_bias": False},
}
"""Variants, and the keys of their configs that GGUF metadata cannot say otherwise, or llama.cpp does not know."""


@pytest.fixture(scope="module", params=VARIANTS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write(folder, request.param)


def make_runner(model, *, page_size=16, kernels="auto", dtype="float32", **settings):
    config = Config(
        device=DEVICE,
        dtype=dtype,
        page_size=page_size,
        max_total_tokens=1024,
        num_threads=1,
        kernels=kernels,
        **settings,
    )
    return load_runner(open_model(model), config)


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


SETTINGS = [(16, 1000, "auto"), (1, 16, "torch"), (16, 7, "auto"), (4, 33, "torch"), (1, 1, "auto")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "page_size", "chunk", "kernels"),
    [
        (variant, *settings)
        for place, variant in enumerate(VARIANTS)
        for settings in some(SETTINGS[place % 3 + 1 :] + SETTINGS[: place % 3 + 1], 2)
    ],
    indirect=["model"],
)
def test_greedy_tokens_and_all_logprobs_equal_transformers(model, page_size, chunk, kernels):
    folder, oracle = model
    runner = make_runner(folder, page_size=page_size, kernels=kernels)
    check_parity(runner, oracle, PROMPT, shuffled_pages(runner)[: -(-100 // page_size)], count=12, chunk=chunk)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("variant", "kernels"), [*product(IN_GGUF, ["auto"]), ("qwen3-5", "torch")])
def test_a_gguf_file_gives_the_tokens_and_logprobs_of_transformers(variant, kernels, tmp_path):
    oracle = write(tmp_path, variant, **IN_GGUF[variant])
    runner = make_runner(tiny_gguf.write_from_transformers(tmp_path / "m.gguf", oracle), kernels=kernels)
    check_parity(runner, oracle, PROMPT, range(8), count=4)


def _fused_qkv(tensors, oracle):
    for layer, kind in product(range(2), ("weight", "bias")):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)


def _by_key_head(tensors, oracle):
    for layer in (0, 1, 3):
        for part in ("qkv", "gate"):
            del tensors[f"blk.{layer}.attn_{part}.weight"]
        weight = oracle.state_dict()[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        tensors[f"blk.{layer}.ssm_in.weight"] = weight.numpy()


def _gate_and_up_apart(tensors, oracle):
    for layer in range(6):
        gate_up = tensors.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        for part, half in zip(("gate", "up"), np.split(gate_up, 2, axis=1), strict=True):
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(half)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("variant", "fuse"), [("glm", _fused_qkv), ("qwen3-next", _by_key_head), ("gemma4-moe", _gate_and_up_apart)]
)
def test_matrices_that_other_gguf_files_have_in_one_or_apart_are_read(variant, fuse, tmp_path):
    oracle = write(tmp_path, variant)
    tensors = {name: array for _, name, array in converted_gguf.tensors(oracle)}
    tensors |= converted_gguf.rope_tensors(oracle.config)
    fuse(tensors, oracle)
    metadata = converted_gguf.metadata(oracle) | tiny_gguf.byte_vocabulary()
    runner = make_runner(tiny_gguf.write_gguf(tmp_path / "m.gguf", metadata, tensors))
    check_parity(runner, oracle, PROMPT, range(8), count=4)


def test_weights_in_float16_stay_exact_in_small_models(tmp_path, monkeypatch):
    write(tmp_path, "llama", dtype=torch.float16)
    oracle = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    runner = make_runner(tmp_path, dtype="auto", kv_cache_dtype="float32")
    assert runner.call("device")["dtype"] == "f32"
    check_parity(runner, oracle, PROMPT, range(8), count=2)
    monkeypatch.setattr("tureen.runner.native.SMALL_MODEL", 1)
    assert make_runner(tmp_path, dtype="auto").call("device")["dtype"] == "bf16"


def mutations(config):
    """Yield a name of the mutation, the changed config, and the kind of weights that get noise."""
    for kind in mutated.kinds(config.weights()):
        if not kind.endswith("act_fn.eps"):  # a limit so near 0 that the noise moves nothing past it
            yield kind, config, kind
    for window in dict.fromkeys(config.windows[layer] for layer in config.cached_layers):
        other = len(BEGINNING) // 2 if window is None else window + 1
        windows = tuple(other if one == window else one for one in config.windows)
        yield f"window {window}", replace(config, windows=windows), None
    for rope in dict.fromkeys(config.ropes[layer] for layer in config.cached_layers):
        other = RopeConfig(theta=10000.0) if rope is None else replace(rope, theta=1.05 * rope.theta)
        ropes = tuple(other if one == rope else one for one in config.ropes)
        yield f"rope {rope}", replace(config, ropes=ropes), None
    for mixer in {mixer for mixer in config.mixers if isinstance(mixer, Mamba2)}:
        for changes in mixer_mutations(mixer):
            mixers = tuple(replace(one, **changes) if one == mixer else one for one in config.mixers)
            yield f"{changes}", replace(config, mixers=mixers), None
    for name in Multipliers.__struct_fields__ if config.mixers_beside else ():
        multipliers = replace(config.multipliers, **{name: 1.05 * getattr(config.multipliers, name)})
        yield name, replace(config, multipliers=multipliers), None


def mixer_mutations(mixer):
    """Yield other values of a Mamba 2 layer's settings."""
    yield {"step_limits": (0.6, 1.2)}
    yield {"in_scale": 1.05 * mixer.in_scale}
    yield {"out_scale": 1.05 * mixer.out_scale}
    for index, scale in enumerate(mixer.scales):
        yield {"scales": (*mixer.scales[:index], 1.05 * scale, *mixer.scales[index + 1 :])}
    if mixer.has_norm:
        yield {"gate_last": not mixer.gate_last}


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
    [
        *((name, variant, "auto") for name, variant in MUTATED.items()),
        ("Gemma3ForCausalLM", "gemma3", "torch"),
        ("FalconH1ForCausalLM", "falcon-h1-norm", "torch"),
    ],
    indirect=["model"],
)
def test_noise_in_any_weight_another_window_rope_or_factor_is_noticed(architecture, model, kernels, monkeypatch):
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
    others = ("ForConditionalGeneration", "Model", "ForSequenceClassification")  # the last two have no logits of tokens
    named_twice = {"PhiMoEForCausalLM"}
    assert set(MUTATED) == {name for name in known if not name.endswith(others)} - named_twice


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


@pytest.mark.parametrize("model", [name for name in VARIANTS if name not in NOT_IN_OLDER_STYLE], indirect=True)
def test_a_config_in_the_older_style_means_the_same(model, tmp_path):
    folder, oracle = model
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    parameters = parameters.get("full_attention", parameters)
    if config["model_type"] not in TYPED:
        config.pop("layer_types", None)
    config |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    runner = make_runner(tmp_path)
    assert generate(runner, Running(0, PROMPT, range(8)), 4) == greedy(oracle, PROMPT, 4)


def test_a_published_config_of_gemma_3n_names_the_bases_of_its_two_ropes_outside_rope_parameters(tmp_path):
    oracle = write(tmp_path, "gemma3n", rope_parameters=PLAIN_ROPES)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 100000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert generate(make_runner(tmp_path), Running(0, PROMPT, range(8)), 4) == greedy(oracle, PROMPT, 4)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(StartupError, match=r"MambaForCausalLM.*Gemma3ForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load_runner(open_model(tmp_path), Config(device=DEVICE))


@pytest.mark.parametrize("kernels", ["auto", "gguf", "torch"])
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
    model = tiny_gguf.write_from_transformers(tmp_path / "m.gguf", oracle) if kernels == "gguf" else tmp_path
    with caplog.at_level("INFO", "tureen"):
        runner = make_runner(model, context_length=context_length, kernels=kernels.replace("gguf", "auto"))
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_gguf", [False, True])
def test_phimoe_with_longrope_has_the_magnitude_of_the_checkpoint(is_gguf, tmp_path):
    """llama.cpp's converter writes 1.19, from a formula."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 1.7, 1.8, 1.9, 2.0],
        "long_factor": [4.0] * 8,
        "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
    }
    more = {"rope_parameters": parameters, "max_position_embeddings": 131072, "router_jitter_noise": 0.01}
    oracle = write(tmp_path, "phimoe", **more)
    model = tiny_gguf.write_from_transformers(tmp_path / "m.gguf", oracle) if is_gguf else tmp_path
    check_parity(make_runner(model), oracle, PROMPT, range(7), count=4, chunk=7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", LARGER)
def test_the_text_model_of_a_model_that_sees_equals_transformers(variant, tmp_path):
    oracle, prompt = write_larger(tmp_path, variant), [token % 240 for token in PROMPT]
    runner = make_runner(tmp_path)
    check_parity(runner, oracle, prompt, shuffled_pages(runner)[:7], count=4, chunk=7)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("glm4-moe", "model.layers.3.eh_proj.weight"),
        ("qwen3-5", "mtp.fc.weight"),
        ("ernie4-5-moe", "model.mtp_linear_proj.0.weight"),
    ],
)
def test_stored_layers_that_guess_further_tokens_are_left_out(variant, name, tmp_path):
    oracle = write(tmp_path, variant)
    save_file(load_file(tmp_path / WEIGHTS) | {name: torch.ones(64, 128)}, tmp_path / WEIGHTS, {"format": "pt"})
    runner = make_runner(tmp_path)
    check_parity(runner, oracle, PROMPT, shuffled_pages(runner)[:7], count=4)


def test_a_layer_that_the_config_does_not_have_is_refused(tmp_path):
    write(tmp_path, "llama")
    name = "model.layers.2.mlp.up_proj.weight"
    save_file(load_file(tmp_path / WEIGHTS) | {name: torch.ones(96, 64)}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(StartupError, match=name):
        make_runner(tmp_path)


def test_experts_that_a_file_keeps_in_one_tensor_are_taken_apart(tmp_path):
    oracle = write(tmp_path, "qwen3-5-moe")
    weights = load_file(tmp_path / WEIGHTS)
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        own = {part: [weights.pop(f"{experts}.{i}.{part}_proj.weight") for i in range(6)] for part in PARTS}
        pairs = zip(own["gate"], own["up"], strict=True)
        weights[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        weights[f"{experts}.down_proj"] = torch.stack(own["down"])
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    runner = make_runner(tmp_path)
    check_parity(runner, oracle, PROMPT, shuffled_pages(runner)[:7], count=4)


@pytest.mark.parametrize("parameters", [{"rope_theta": 7e4}, {"rope_parameters": {"rope_theta": 7e4}}])
def test_both_ropes_of_olmo_3_have_the_one_theta_of_a_config(parameters, tmp_path):
    write(tmp_path, "olmo3")
    hf = json.loads((tmp_path / "config.json").read_text())
    del hf["rope_parameters"]
    assert {rope.theta for rope in loading.describe(hf | parameters).ropes} == {7e4}


@pytest.mark.parametrize("variant", ["starcoder2", "llama", "arcee"])
@pytest.mark.parametrize("name", ["clamped_swiglu", "xielu", "tanh"])
def test_an_activation_of_another_family_is_refused(variant, name, tmp_path):
    write(tmp_path, variant)
    hf = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(StartupError, match=f"hidden_act: '{name}' is not supported; known: silu"):
        loading.describe(hf | {"hidden_act": name})


def test_an_odd_number_of_rotated_dimensions_is_refused(tmp_path):
    write(tmp_path, "glm")
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["rope_parameters"]["partial_rotary_factor"] = 0.66
    with pytest.raises(StartupError, match="partial_rotary_factor"):
        loading.describe(hf)
