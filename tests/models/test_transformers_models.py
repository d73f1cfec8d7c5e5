"""Models that only transformers knows, through this server's attention."""

import json
import warnings

import pytest
import torch
import transformers
from runner_driver import PROMPT, Running, folder_source, generate, step
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, greedy, logprobs, spread

from tureen.config import Config
from tureen.contract.runner import Batch, Row
from tureen.contract.types import LogprobSpec
from tureen.errors import StartupError
from tureen.runner.load import load_runner

CLOSE = 1e-4
FAMILIES = {
    "Afmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # passes its mask by keyword
    "StableLm": {},
    "Cohere2": {"sliding_window": 12, "num_hidden_layers": 4},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "Gemma2": {"head_dim": 32, "sliding_window": 12, "attn_logit_softcapping": 2.0},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
GEMMA3N = {
    "num_hidden_layers": 4,
    "intermediate_size": [96] * 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
}


def _make_model(folder, family, **more):
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES.get(family, {}) | more))
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)(config)
        spread(model)
        model.save_pretrained(folder)
    model.config._attn_implementation = "eager"
    return model.float().eval()


def _make_runner(folder, *, dtype="float32"):
    settings = {"dtype": dtype, "max_total_tokens": 1024, "num_threads": 1, "device": "cpu"}
    return load_runner(folder_source(folder), Config(model_impl="transformers", **settings))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return _make_model(folder, request.param), _make_runner(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [1000, 7])
def test_its_greedy_tokens_and_all_logprobs_equal_transformers(model, chunk):
    oracle, runner = model
    sequence = Running(0, PROMPT, range(64)[::-1][:6], logprobs=LogprobSpec(prompt_start=0, top=256))
    assert generate(runner, sequence, 12, chunk=chunk, score=True) == greedy(oracle, PROMPT, 12, draft=sequence.output)
    expected = logprobs(oracle, sequence.token_ids[:-1])
    reports = sequence.prompt_logprobs + sequence.output_logprobs
    assert len(reports) == len(expected)
    distances = [abs(value - row[token]) for report, row in zip(reports, expected.tolist(), strict=True)
                 for value, token in report.top]  # fmt: skip
    assert max(distances) < CLOSE


@pytest.mark.filterwarnings("ignore")
def test_its_rows_do_not_mix(model):
    oracle, runner = model
    prompts = [PROMPT[start : start + length] for start, length in ((0, 1), (3, 20), (20, 41))]
    sequences = [Running(i, prompt, range(6 * i, 6 * i + 6)) for i, prompt in enumerate(prompts)]
    while len(sequences[2].output) < 4:
        step(runner, sequences, (1, 8, 50))
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == greedy(oracle, prompt, len(sequence.output), draft=sequence.output)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "more", "complaint"),
    [
        ("Mamba", {}, "layer 0 has no attention"),
        ("GptOss", {"num_local_experts": 4}, "s_aux"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "layer 0 has no attention"),
        ("Phimoe", {"num_local_experts": 4, "sliding_window": 16}, "window is only in the model's mask"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "scaling dynamic"),
    ],
)
def test_a_model_whose_layers_mix_tokens_in_other_ways_is_refused(family, more, complaint, tmp_path):
    _make_model(tmp_path, family, **more)
    with pytest.raises(StartupError, match=complaint):
        _make_runner(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "more", "way"),
    [
        ("FalconH1", MAMBA, "together with another one"),  # a state that runs on from one text into the next
        ("DiffLlama", {}, "in pieces"),  # two calls of attention in each layer
        ("Gemma3nText", GEMMA3N, "alone"),  # a second embedding of the token ids
        ("Roberta", {"is_decoder": True, "hidden_act": "gelu"}, "alone"),  # positions that begin at pad_token_id + 1
    ],
)
def test_a_model_that_computes_other_logits_than_in_transformers_is_refused(family, more, way, tmp_path):
    _make_model(tmp_path, family, **more)
    with pytest.raises(StartupError, match=rf"computed {way} differ by up to \d.*tureen models") as refusal:
        _make_runner(tmp_path)
    assert refusal.value.field == "model_impl"


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_code_fails_with_our_attention_is_refused_in_one_line(tmp_path):
    sizes = {"decoder_layers": 3, "encoder_layers": 2, "num_hidden_layers": 2}  # our cache has as many as the encoder
    _make_model(tmp_path, "Bart", d_model=64, decoder_ffn_dim=96, decoder_attention_heads=4, **sizes)
    with pytest.raises(StartupError, match=r"own code in transformers fails .*IndexError.*tureen models") as refusal:
        _make_runner(tmp_path)
    assert "\n" not in refusal.value.message


@pytest.mark.filterwarnings("ignore")
def test_rounding_to_fewer_bits_is_no_reason_to_refuse_a_model(tmp_path):
    _make_model(tmp_path, "Olmoe", num_hidden_layers=4)  # rounding sends tokens to other experts
    assert _make_runner(tmp_path, dtype="bfloat16").forward.dtype == "bfloat16"


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_files_lack_a_weight_is_refused(tmp_path):
    _make_model(tmp_path, "StableLm")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=r"lack 1 weights: model\.layers\.1\.mlp\.up_proj"):
        _make_runner(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["StableLm", "GPT2"])
def test_a_row_does_not_depend_on_its_neighbours(family, tmp_path):
    _make_model(tmp_path, family)
    runner = _make_runner(tmp_path)
    row = Row(0, tuple(PROMPT[:9]), 0, (0,), True)
    alone = runner.forward.run(Batch((row,))).logits.clone()
    mates = tuple(Row(i, tuple(PROMPT[i : 2 * i + 3]), 0, (2 * i, 2 * i + 1), True) for i in range(1, 9))
    assert torch.equal(runner.forward.run(Batch((row, *mates))).logits[:1], alone)


def test_what_transformers_does_not_know_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nosuch", "architectures": ["NoSuch"]}))
    with pytest.raises(StartupError, match="transformers cannot load it") as refusal:
        _make_runner(tmp_path)
    assert "\n" not in refusal.value.message
