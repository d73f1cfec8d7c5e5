"""Folders that peft wrote are read as peft reads them; every other folder is refused, and says why."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from peft.utils.other import get_pattern_key
from runner_driver import folder_source
from tiny_adapters import CONFIG, WEIGHTS, change_config, change_tensors, write_adapter
from tiny_models import write

from tureen.errors import InvalidRequest
from tureen.lora.adapter import MAX_CONFIG_BYTES, _matcher, read_adapter
from tureen.runner.loading import describe
from tureen.weights.source import model_config

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 2, r"model\.layers\.1\.mlp\.up_proj": 9, "layers.1.self_attn.o_proj": 1},
    "alpha_pattern": {"mlp.*": 3, "layers.0.self_attn.q_proj": 0.5, "proj": 8},
}
FAMILIES = ("llama", "phi3", "qwen2", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = write(folder, request.param)
    return model, describe(model_config(folder_source(folder)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model and one adapter for it."""
    folder = tmp_path_factory.mktemp("llama")
    model = write(folder, "llama")
    write_adapter(model, folder / "adapter")
    return model, describe(model_config(folder_source(folder))), folder / "adapter"


@pytest.fixture
def bad(llama, tmp_path):
    """A copy of the adapter, to be spoilt, and what reading it says."""
    _, config, adapter = llama
    folder = tmp_path / "a secret place"
    shutil.copytree(adapter, folder)

    def complaint() -> str:
        with pytest.raises(InvalidRequest) as caught:
            read_adapter(str(folder), config)
        error = caught.value
        assert (error.field, error.code, error.status) == ("lora_path", "invalid_adapter", 400)
        assert "secret" not in error.message
        assert len(error.message) < 400
        return error.message

    return folder, complaint


def deltas(adapter):
    """What is added to each matrix: float64 [outputs, inputs]."""
    return {name: factors.up.astype(np.float64) @ factors.down.astype(np.float64) for name, factors in adapter.items()}


def peft_deltas(adapted, config):
    """The same from peft, fused matrices cut where the model's own begin."""
    found = {}
    for name, module in adapted.base_model.model.named_modules():
        if not hasattr(module, "get_delta_weight") or not module.lora_A:
            continue
        delta = module.get_delta_weight("default").detach().double().numpy()
        before, _, last = name.rpartition(".")
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.get(last, [last])
        first = 0
        for part in parts:
            rows = config.weights()[f"{before}.{part}.weight"][0]
            found[f"{before}.{part}"] = delta[first : first + rows]
            first += rows
        assert first == len(delta)
    return found


def check_equal(folder, adapted, config) -> None:
    ours, theirs = deltas(read_adapter(str(folder), config)), peft_deltas(adapted, config)
    assert set(ours) == set(theirs)
    for name, delta in theirs.items():
        np.testing.assert_allclose(ours[name], delta, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_adapter_on_all_linear_layers_adds_what_peft_adds(family, dtype, tmp_path):
    model, config = family
    adapted = write_adapter(model, tmp_path, dtype=dtype)
    check_equal(tmp_path, adapted, config)
    assert len(read_adapter(str(tmp_path), config)) == 7 * config.num_layers


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_rslora": True, **PATTERNS},
        PATTERNS,
        {"r": 1, "lora_alpha": 0},
        {"lora_alpha": -2.5},
        {"r": 60, "target_modules": ["down_proj"]},
        {"target_modules": ATTENTION, "layers_to_transform": [1]},
        {"target_modules": r".*\.0\.(self_attn\.[qkv]_proj|mlp\.\w+_proj)"},
        {"exclude_modules": ["q_proj"], "lora_dropout": 0.5},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_ranks_and_scales_are_those_of_peft(llama, settings, tmp_path):
    model, config, _ = llama
    check_equal(tmp_path, write_adapter(model, tmp_path, **settings), config)


def test_a_pattern_for_fused_matrices_counts_for_all_that_it_is_made_of(tmp_path):
    model = write(tmp_path, "phi3")
    config = describe(model_config(folder_source(tmp_path)))
    settings = {"rank_pattern": {"qkv_proj": 3}, "alpha_pattern": {"gate_up_proj": 5}}
    check_equal(tmp_path / "a", write_adapter(model, tmp_path / "a", **settings), config)


def test_experts_are_not_adapted_but_what_every_token_passes_is(tmp_path):
    model = write(tmp_path, "qwen2-moe")
    config = describe(model_config(folder_source(tmp_path)))
    shared = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
    check_equal(tmp_path / "a", write_adapter(model, tmp_path / "a", target_modules=ATTENTION + shared), config)
    write_adapter(model, tmp_path / "b", target_modules=["shared_expert_gate"])
    write_adapter(model, tmp_path / "c", target_modules=["q_proj"])
    expert = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_{}.weight"
    change_tensors(
        tmp_path / "c",
        lambda tensors: tensors | {expert.format("A"): torch.ones(4, 64), expert.format("B"): torch.ones(48, 4)},
    )
    for folder, what in (("b", "shared_expert_gate"), ("c", r"experts\.0\.up_proj")):
        with pytest.raises(InvalidRequest, match=f"{what}.*for which adapters are not supported"):
            read_adapter(str(tmp_path / folder), config)


def test_names_inside_a_model_that_sees_are_those_of_its_language_model(llama, tmp_path):
    _, config, folder = llama
    for prefix in ("model.language_model.", "language_model.model."):
        copied = tmp_path / prefix
        shutil.copytree(folder, copied)
        change_tensors(
            copied,
            lambda tensors, prefix=prefix: {
                name.replace("model.model.model.", f"model.model.{prefix}"): tensor for name, tensor in tensors.items()
            },
        )
        assert read_adapter(str(copied), config).keys() == read_adapter(str(folder), config).keys()


def test_a_link_to_a_folder_and_a_home_directory_are_followed(llama, tmp_path, monkeypatch):
    _, config, folder = llama
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_adapter(str(tmp_path / "link"), config).keys() == read_adapter("~/link", config).keys()


def test_older_peft_names_of_tensors_are_known(llama, tmp_path):
    _, config, folder = llama
    shutil.copytree(folder, tmp_path / "a")
    change_tensors(
        tmp_path / "a",
        lambda tensors: {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()},
    )
    assert read_adapter(str(tmp_path / "a"), config).keys() == read_adapter(str(folder), config).keys()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_folder_without_one_of_the_files_is_refused(bad, name):
    folder, complaint = bad
    (folder / name).rename(folder / "adapter_model.bin")
    assert f"has no readable {name}" in complaint()
    os.mkfifo(folder / name)
    assert f"{name} that cannot be read" in complaint()
    assert "it is a named pipe (FIFO), not a regular file" in complaint()


@pytest.mark.parametrize("path", ["", "/nowhere", "~nobody-of-this-name/x", "\0", "x" * 5000, "https://a.example/x"])
def test_what_is_no_folder_is_refused(llama, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=r"has no readable adapter_config\.json"):
        read_adapter(path, llama[1])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "without peft_type"),
        (b"{" + b" " * MAX_CONFIG_BYTES + b"}", "more than 1 MiB"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_that_is_no_adapter_s_is_refused(bad, content, fault):
    folder, complaint = bad
    (folder / CONFIG).write_bytes(content)
    assert fault in complaint()


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("peft_type", "LOHA", "'LOHA'"),
        ("use_dora", True, "use_dora true"),
        ("use_qalora", True, "use_qalora"),
        ("bias", "all", "bias 'all'"),
        ("lora_bias", True, "lora_bias"),
        ("fan_in_fan_out", True, "fan_in_fan_out"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("target_parameters", ["experts.gate_up_proj"], "target_parameters"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("layer_replication", [[0, 1]], "layer_replication"),
        ("alora_invocation_tokens", [1], "alora_invocation_tokens"),
        ("kasa_config", {"beta": 1}, "kasa_config"),
        ("init_lora_weights", "pissa", "init_lora_weights 'pissa'"),
        ("init_lora_weights", "loftq", "init_lora_weights 'loftq'"),
        ("use_something_of_2031", True, "'use_something_of_2031'"),
        ("r", 0, "the rank 0"),
        ("r", True, "the rank true"),
        ("r", "4", "the rank '4'"),
        ("r", 513, "the rank 513"),
        ("r", 10**400, "an integer of"),
        ("r", None, "the rank null"),
        ("r", 5, "says 5"),
        ("lora_alpha", None, "lora_alpha null"),
        ("lora_alpha", "6", "lora_alpha '6'"),
        ("lora_alpha", True, "lora_alpha true"),
        ("lora_alpha", float("nan"), "lora_alpha nan"),
        ("lora_alpha", float("inf"), "lora_alpha inf"),
        ("lora_alpha", 10**400, "lora_alpha an integer of"),
        ("rank_pattern", ["q_proj"], "rank_pattern that is not an object"),
        ("rank_pattern", {"(": 4}, "'(' in its rank_pattern"),
        (
            "rank_pattern",
            {"(?=q)q_proj": 4},
            "a lookaround or a backreference, which are not supported; write modules'",
        ),
        ("rank_pattern", {f"q*{number}": 4 for number in range(65)}, "65 of them patterns; at most"),
        ("rank_pattern", {f"q{number}": 4 for number in range(1 << 14 | 1)}, "has 16385 entries in its rank_pattern"),
        ("alpha_pattern", {"q*" * 999: 4}, "has more than 1024 characters"),
        ("rank_pattern", {"q_proj": 5}, "says 5"),
        ("alpha_pattern", {"q_proj": []}, "lora_alpha a list"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_its_name(bad, key, value, fault):
    folder, complaint = bad
    change_config(folder, **{key: value})
    assert fault in complaint()


def test_a_key_that_changes_nothing_may_be_there(llama, tmp_path):
    _, config, folder = llama
    shutil.copytree(folder, tmp_path / "a")
    change_config(tmp_path / "a", something_new=None, something_else=False, use_dora=None, revision="main")
    assert read_adapter(str(tmp_path / "a"), config)


@pytest.mark.parametrize(
    "key",
    [
        "q_proj", "j", "self_attn.q_proj", "^q_proj", "^model.layers.0.self_attn.q_proj", "q_proj$", ".*q_proj",
        r"0\.self_attn\.q_proj", r"layers\.(0|7)\..*", r"model\.layers\.\d+\.self_attn.[qk]_proj", "^.*$",
        "(q|k)_proj", "mlp|self_attn", "layers.0", "q_proj|k_proj$",
    ],
)  # fmt: skip
def test_an_entry_is_for_the_modules_that_peft_says_it_is_for(key):
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.k_proj", "q_proj", "model.xq_proj"):
        expected = get_pattern_key([key], module) == key
        assert _matcher(key, "rank_pattern")(module) == expected, module


def test_a_pattern_that_takes_others_for_ever_is_matched_in_linear_time(llama, tmp_path):
    _, config, folder = llama
    shutil.copytree(folder, tmp_path / "a")
    endless = "(" + "(.|.|.|.)+" * 9 + ")+!"
    change_config(tmp_path / "a", rank_pattern={endless: 1}, alpha_pattern={endless: 1, "q_proj": 6})
    assert read_adapter(str(tmp_path / "a"), config).keys() == read_adapter(str(folder), config).keys()


def _renamed(old, new):
    return lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda _: {}, "has no weights"),
        (lambda tensors: {FIRST: tensors[FIRST]}, "only one of lora_A and lora_B"),
        (lambda tensors: tensors | {FIRST: torch.full((4, 64), float("nan"))}, "non-finite"),
        (lambda tensors: tensors | {FIRST: torch.full((4, 64), -float("inf"))}, "non-finite"),
        (lambda tensors: tensors | {FIRST: torch.ones(4, 63)}, "63 inputs and 64 outputs, here there are 64 and 64"),
        (lambda tensors: tensors | {FIRST: torch.ones(5, 64)}, "factors of rank 5 and 4"),
        (lambda tensors: tensors | {FIRST: torch.ones(4)}, "not a matrix"),
        (lambda tensors: tensors | {FIRST: torch.ones(4, 64, dtype=torch.int8)}, "not a matrix"),
        (lambda tensors: tensors | {FIRST: torch.ones(4, 0)}, "not a matrix"),
        (lambda tensors: tensors | {FIRST.replace("A.weight", "magnitude_vector"): torch.ones(4)}, "lora_magnitude_"),
        (lambda tensors: tensors | {FIRST.replace("lora_A.weight", "bias"): torch.ones(4)}, "linear layers only"),
        (lambda tensors: tensors | {FIRST.replace("A.", "A.default."): tensors[FIRST].clone()}, "twice"),
        (_renamed(r"layers\.1", "layers.7"), "'model.layers.7."),
        (_renamed("model.layers.0.self_attn.q_proj", "lm_head"), "'lm_head'"),
        (_renamed("model.layers.0.self_attn.q_proj", "model.embed_tokens"), "'model.embed_tokens'"),
        (_renamed("self_attn.q_proj.lora_A", "self_attn.q_proj.lora_embedding_A"), "lora_embedding_"),
        (_renamed("layers.0.self_attn.q_proj", "vision_tower.q_proj"), "vision_tower"),
        (_renamed("layers.0.self_attn.q_proj", "layers.0.input_layernorm"), "input_layernorm"),
        (_renamed("base_model.model.", ""), "'model.layers.0"),
        (
            lambda tensors: tensors | _renamed("model.layers", "model.language_model.layers")(tensors),
            "twice, under different names",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_their_names(bad, change, fault):
    folder, complaint = bad
    change_tensors(folder, change)
    assert fault in complaint()


def test_numbers_that_only_their_scale_makes_infinite_are_refused(bad):
    folder, complaint = bad
    change_config(folder, lora_alpha=1e6)
    change_tensors(folder, lambda tensors: tensors | {FIRST.replace("A", "B"): torch.full((64, 4), 1e37)})
    assert "non-finite" in complaint()


def test_an_adapter_of_another_model_is_refused(bad, tmp_path):
    folder, complaint = bad
    shutil.rmtree(folder)
    write_adapter(write(tmp_path / "other", "llama", hidden_size=32, intermediate_size=64), folder)
    assert "is for another model" in complaint()


@pytest.mark.parametrize("at", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut_short_is_refused(bad, at):
    folder, complaint = bad
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:at])
    assert f"has a {WEIGHTS} that cannot be read" in complaint()


def test_a_huge_tensor_that_does_not_belong_is_refused_before_it_is_read(bad):
    folder, complaint = bad
    size = 1 << 38
    entry = {"dtype": "F32", "shape": [size >> 2, 1], "data_offsets": [0, size]}
    header = json.dumps({FIRST: entry, FIRST.replace("A", "B"): entry}).encode()
    with (folder / WEIGHTS).open("wb") as file:  # sparse: takes no room
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert "cannot be read" in complaint()  # two tensors in the same place
    header = json.dumps({FIRST: entry}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert "only one of" in complaint()
