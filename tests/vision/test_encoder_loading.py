"""What an encoder does with checkpoints and items that are wrong, and how models say what text model they have."""

import json

import msgspec
import numpy as np
import pytest
import tiny_llava
import tiny_models
import torch
import transformers
from runner_driver import folder_source
from safetensors.torch import load_file, save_file

from tureen.config import Config
from tureen.contract.types import MediaItem
from tureen.devices.base import DeviceInfo
from tureen.errors import RequestFailed, StartupError
from tureen.kernels.cpu import native
from tureen.log import no_progress
from tureen.media.llava_names import local_name
from tureen.media.llava_next import parse as parse_family
from tureen.runner import encoder as encoder_module
from tureen.runner.encoder import load_encoder
from tureen.runner.load import load_runner
from tureen.runner.loading import describe
from tureen.weights.source import model_config, preprocessor_config
from tureen.weights.stored import VISION

CPU = DeviceInfo("cpu", "cpu", 2)
needs_kernels = pytest.mark.skipif(native.load() is None, reason="no native kernels")


def _load_encoder(folder, device=CPU):
    source = folder_source(folder)
    return load_encoder(source, model_config(source), Config(), device, no_progress)


@pytest.fixture
def next_folder(tmp_path):
    tiny_llava.write(tmp_path, "next-vicuna")
    return tmp_path


def _change(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def _make_item(**changes):
    item = MediaItem("", 0, 16 + 20, bytes(3 * 28 * 28 * 3), (3, 28, 28, 3), (2, 1, 0, 0, 8, 4, 8, 4))
    return msgspec.structs.replace(item, num_tokens=16 + 8 * 5, **changes)


def test_a_text_model_has_no_encoder(tmp_path):
    tiny_models.write(tmp_path, "llama")
    assert load_runner(folder_source(tmp_path), Config(device="cpu", max_total_tokens=64)).encoder is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("image_newline"), "lacks 1 weights of the vision encoder, such as newline"),
        (
            lambda weights: weights.update(image_newline=weights["image_newline"][:9].clone()),
            r"newline has shape \[9\]",
        ),
        (
            lambda weights: weights.update(
                {"vision_tower.encoder.layers.0.gate.weight": weights["image_newline"].clone()}
            ),
            "vision_tower.encoder.layers.0.gate.weight; is config.json its own",
        ),
        (
            lambda weights: weights.update({"multi_modal_projector.linear_3.weight": weights["image_newline"].clone()}),
            "multi_modal_projector.linear_3.weight; is config.json its own",
        ),
        (
            lambda weights: weights.update(
                {"vision_tower.embeddings.patch_embedding.bias": weights["image_newline"].clone()}
            ),
            "tower.patches.bias has shape .*, config.json says it is absent",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(next_folder, change, message):
    _change(next_folder, change)
    with pytest.raises(StartupError, match=message):
        _load_encoder(next_folder)


def test_memory_is_checked_before_weights_are_read(next_folder, monkeypatch):
    monkeypatch.setattr("tureen.devices.cpu.free_bytes", lambda: 1000)
    monkeypatch.setattr("tureen.runner.encoder.iter_vision", None)
    with pytest.raises(StartupError, match=r"the weights need .* in (int16|float32) for the vision encoder"):
        _load_encoder(next_folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": ()},
        {"layout": (1, 2, 0, 0, 8, 5, 8, 5)},
        {"layout": (2, 2, 0, 0, 8, 4, 8, 4)},
        {"layout": (2, 1, -1, 0, 8, 4, 8, 4)},
        {"layout": (2, 1, 0, 0, 8, 4, 1 << 30, 4)},
        {"layout": (5, 5)},
        {"layout": (2, 1, 0)},
        {"shape": (3, 28, 27, 3)},
        {"shape": (3, 28, 84, 1)},
        {"shape": (3, 42, 42, 3), "pixels": bytes(3 * 42 * 42 * 3)},
        {"pixels": b""},
    ],
)
def test_an_item_that_no_family_makes_fails_alone(next_folder, changes):
    encoder = _load_encoder(next_folder)
    with pytest.raises(RequestFailed):
        list(encoder.encode(_make_item(**changes)))
    assert len(list(encoder.encode(_make_item()))[-1]) == (16 + 40) * 64 * 4


def test_an_item_with_another_number_of_tokens_fails_alone(next_folder):
    encoder = _load_encoder(next_folder)
    with pytest.raises(RequestFailed, match="56 embeddings, not 55"):
        list(encoder.encode(msgspec.structs.replace(_make_item(), num_tokens=55)))


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "llama"},
        {},
        {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 4096},
        {"model_type": "mistral"},
        {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "use_sliding_window": True, "tie_word_embeddings": True},
        {"model_type": "qwen3"},
    ],
)
def test_keys_that_a_text_config_leaves_out_have_the_values_of_transformers(text):
    whole = transformers.LlavaConfig(text_config=dict(text)).text_config
    architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3"}.get(whole.model_type, whole.model_type.capitalize())
    expected = describe({**whole.to_dict(), "architectures": [f"{architecture}ForCausalLM"]})
    hf = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    assert describe(hf) == expected


@pytest.mark.parametrize("family", ["Llava", "LlavaNext", "LlavaOnevision"])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_weights_are_tied_where_transformers_ties_them(family, outer, inner):
    text = {**tiny_models.SHAPE, "model_type": "qwen2", "tie_word_embeddings": inner}
    config = getattr(transformers, f"{family}Config")(text_config=dict(text), tie_word_embeddings=outer)
    hf = {"architectures": [f"{family}ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": outer}
    assert describe(hf).tie_embeddings == config.tie_word_embeddings


def test_an_unknown_text_model_is_refused_with_the_known_ones():
    hf = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "opt"}}
    with pytest.raises(StartupError, match=r"text_config: model_type: 'opt' is not supported; known: .*llama.*qwen2"):
        describe(hf)


def test_a_newer_folder_keeps_the_preprocessor_in_another_file(next_folder):
    settings = (next_folder / "preprocessor_config.json").read_text()
    expected = preprocessor_config(folder_source(next_folder))
    (next_folder / "preprocessor_config.json").unlink()
    assert preprocessor_config(folder_source(next_folder)) == {}
    newer = {"image_processor": json.loads(settings), "processor_class": "LlavaNextProcessor"}
    (next_folder / "processor_config.json").write_text(json.dumps(newer))
    assert preprocessor_config(folder_source(next_folder)) == expected


ORIGINAL = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava",
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "image_aspect_ratio": "anyres",
    "mm_patch_merge_type": "spatial_unpad",
    "mm_use_im_start_end": False,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    **tiny_models.SHAPE,
}


def _write_original(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**ORIGINAL, **changes}))


def test_the_config_of_an_original_checkpoint_is_that_of_its_conversion(tmp_path):
    _write_original(tmp_path)
    source = folder_source(tmp_path)
    hf = model_config(source)
    text = {**tiny_models.SHAPE, "model_type": "llama"}
    converted = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "text_config": text,
        "model_type": "llava_next",
    }
    assert describe(hf) == describe(converted)
    family = parse_family(hf, preprocessor_config(source))
    [prepared] = family.prepare([tiny_llava.picture(800, 600)], "image")
    assert prepared.pixels.shape == (5, 336, 336, 3)
    assert prepared.num_tokens == 576 + 36 * 49


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.mm_projector.0.bias", "projector.fc1.bias"),
        ("model.mm_projector.2.weight", "projector.fc2.weight"),
        ("model.image_newline", "newline"),
        ("model.vision_tower.vision_tower.vision_model.embeddings.class_embedding", "tower.class_token"),
        ("model.vision_tower.vision_tower.vision_model.pre_layrnorm.bias", "tower.input_norm.bias"),
        (
            "model.vision_tower.vision_tower.vision_model.encoder.layers.22.self_attn.out_proj.weight",
            "tower.layers.22.out.weight",
        ),
        ("model.vision_tower.vision_tower.vision_model.encoder.layers.23.mlp.fc1.weight", None),
        ("model.vision_tower.vision_tower.vision_model.post_layernorm.weight", None),
    ],
)
def test_weights_of_an_original_checkpoint_are_known(name, ours):
    assert local_name(name, 23) == ours
    assert name.startswith(VISION)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mm_vision_tower", "other"),
        ("image_aspect_ratio", "square"),
        ("mm_use_im_start_end", True),
        ("mm_projector_type", "linear"),
        ("mm_patch_merge_type", "flat"),
    ],
)
def test_another_original_checkpoint_is_refused_with_the_conversion_as_the_fix(tmp_path, key, value):
    _write_original(tmp_path, **{key: value})
    with pytest.raises(StartupError, match=f"{key}: .*llava-hf/"):
        model_config(folder_source(tmp_path))


OF_TORCH = (
    (torch, "__version__", "0.0"),
    (torch, "get_num_threads", lambda: 99),
    (torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS"),
)


@needs_kernels
@pytest.mark.parametrize(("kernels", "changes"), [("native", [(np, "__version__", "0.0")]), ("torch", OF_TORCH)])
def test_pages_of_pictures_depend_on_what_computes_the_pictures(next_folder, kernels, changes, monkeypatch):
    config = Config(device="cpu", num_threads=1, max_total_tokens=512, kernels=kernels)
    runner = load_runner(folder_source(next_folder), config)
    before = runner.call("kv_facts")
    assert runner.call("kv_facts") == before
    for place, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert runner.call("kv_facts")["facts"]["encoder"] != before["facts"]["encoder"]


@needs_kernels
def test_native_kernels_give_a_picture_the_same_bits_for_any_threads_and_pieces(next_folder, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, 3 * 28 * 28 * 3, np.uint8).tobytes()
    item, embeddings = _make_item(pixels=pixels), set()
    for threads, piece, rows in ((1, 300_000_000, 256), (2, 50_000, 256), (2, 1, 3), (3, 1, 7)):
        monkeypatch.setattr(encoder_module, "CPU_PIECE", piece)
        for module in ("tower", "projector"):
            monkeypatch.setattr(f"tureen.vision.{module}.MIN_ROWS", rows)
        encoder = _load_encoder(next_folder, DeviceInfo("cpu", "cpu", threads))
        embeddings.add(list(encoder.encode(item))[-1])
    assert len(embeddings) == 1
    assert np.isfinite(np.frombuffer(embeddings.pop(), np.float32)).all()
