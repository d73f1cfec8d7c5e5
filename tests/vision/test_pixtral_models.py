"""Models with Pixtral's tower: pictures, embeddings, logits and tokens equal those of transformers."""

import json

import msgspec
import mutated
import numpy as np
import pytest
import tiny_llava
import tiny_pixtral
import torch
import transformers
from llava_checks import (
    check_embeddings,
    check_encoding_by_turns,
    check_end_to_end,
    check_small_pieces,
    expected_embeddings,
    item_of,
    load_tiny_encoder,
    make_model,
    shown,
)
from runner_driver import folder_source
from safetensors.torch import load_file, save_file
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from tureen.errors import RequestFailed, StartupError
from tureen.media.families import find_family, is_family
from tureen.media.llava_names import local_name
from tureen.media.pixtral import target_size
from tureen.registry import find_model
from tureen.weights.source import model_config, preprocessor_config
from tureen.weights.stored import VISION

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", params=tiny_pixtral.VARIANTS)
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param, tiny_pixtral)


@pytest.fixture(scope="module")
def mistral3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("mistral3"), "mistral-small", tiny_pixtral)


@pytest.mark.parametrize("size", tiny_pixtral.SIZES)
def test_pictures_and_their_rows_are_those_of_transformers(model, size):
    picture = tiny_llava.picture(*size)
    [prepared] = model.family.prepare([picture], "image")
    oracle = tiny_pixtral.processor(model.variant)([picture], return_tensors="np")
    scale, mean, std = map(np.array, model.family.normalisation)
    found = np.moveaxis((prepared.pixels * scale - mean) / std, -1, 1)
    assert found.shape == oracle["pixel_values"].shape
    assert np.abs(found - oracle["pixel_values"]).max() < 1e-5
    assert shown(model, prepared, tiny_pixtral.IMAGE) == tiny_pixtral.expanded(model.variant, *found.shape[2:])


@pytest.mark.parametrize("size", [(28, 28), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_pictures_equal_transformers(model, size):
    pictures = [tiny_llava.picture(*size), tiny_llava.picture(40, 30, seed=1)]
    prepared = model.family.prepare(pictures, "multi-images")
    for one, expected in zip(prepared, expected_embeddings(model, pictures, "image"), strict=True):
        check_embeddings(model.encoder, one, expected)


@pytest.mark.parametrize("unit", [14, 16, 28])
def test_any_picture_is_resized_to_the_size_of_transformers(unit):
    generator = np.random.default_rng(unit)
    for height, width in [(1540, 1540), (1, 200), *np.exp(generator.uniform(4, 9, (500, 2))).astype(int)]:
        limit = (1024, 1540) if height % 2 else (1540, 1540)
        picture = np.broadcast_to(np.uint8(0), (height, width, 3))
        expected = get_resize_output_image_size(picture, limit, unit, "channels_last")
        assert target_size((int(height), int(width)), limit, unit) == expected


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("Mistral3", {"vision_config": {}}),
        ("Mistral3", {"vision_config": {}, "text_config": {"model_type": "mistral"}}),
        ("Mistral3", {"vision_config": {}, "text_config": {"model_type": "ministral3"}}),
        ("Mistral3", {"vision_config": {"model_type": "pixtral", "rope_theta": 500.0}, "spatial_merge_size": 3}),
        (
            "Llava",
            {"vision_config": {"model_type": "pixtral"}, "vision_feature_select_strategy": "full",
             "image_token_index": 9},
        ),
    ],
)  # fmt: skip
def test_keys_that_a_config_leaves_out_have_the_values_of_transformers(family, given):
    whole = getattr(transformers, f"{family}Config")(**given).to_dict()
    parse_vision = find_model(f"{family}ForConditionalGeneration").parse_vision
    assert parse_vision(given) == parse_vision(whole)
    given = {"model_type": whole["model_type"], **given}
    assert find_family(given, {}).placeholder_id == find_family(whole, {}).placeholder_id


@pytest.mark.parametrize(
    ("token", "expected"),
    [({"image_token_id": 9}, 9), ({"image_token_index": 8}, 8), ({"image_token_index": None}, None)],
)
def test_the_token_of_a_picture_has_an_old_and_a_new_name(token, expected):
    assert find_family({"model_type": "mistral3", "vision_config": {}, **token}, {}).placeholder_id == expected


def _is_used(kind):
    return kind.startswith(VISION) and local_name(kind.replace("*", "0"), 1) is not None


def test_noise_in_any_weight_of_the_part_that_sees_is_noticed(model, tmp_path):
    picture = tiny_llava.picture(57, 31)
    [prepared] = model.family.prepare([picture], "image")
    [expected] = expected_embeddings(model, [picture], "image")
    unnoticed, num_kinds = [], 0
    for kind in mutated.folders_with_noise(model.folder, tmp_path, _is_used):
        num_kinds += 1
        encoder = load_tiny_encoder(tmp_path)
        try:
            check_embeddings(encoder, prepared, expected)
        except AssertionError:
            continue
        unnoticed.append(kind)
    assert unnoticed == []
    assert num_kinds >= 13


def test_tokens_after_one_picture_equal_transformers(model):
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image")


def test_tokens_after_several_pictures_equal_transformers(model):
    pictures = [tiny_llava.picture(57, 31), tiny_llava.picture(40, 90, seed=3)]
    check_end_to_end(model, pictures, "multi-images")


def test_tokens_are_the_same_with_torch_and_in_chunks_that_cut_a_picture(model):
    pictures = [tiny_llava.picture(48, 45)]
    check_end_to_end(model, pictures, "image", kernels="torch")
    check_end_to_end(model, pictures, "image", kernels="torch", chunk=5)


def _newer(name):
    name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "language_model.")
    return name if name.startswith("lm_head") else f"model.{name}"


def test_checkpoints_with_newer_names_are_the_same_model(tmp_path):
    model = make_model(tmp_path, "mistral-small", tiny_pixtral)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({_newer(name): weight for name, weight in weights.items()}, tmp_path / WEIGHTS)
    model.encoder = load_tiny_encoder(tmp_path)
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image", kernels="torch")


def test_pictures_that_are_encoded_by_turns_get_the_numbers_of_each_alone(mistral3, monkeypatch):
    prepared = [mistral3.family.prepare([tiny_llava.picture(*size)], "image")[0] for size in ((57, 31), (48, 48))]
    check_encoding_by_turns(mistral3.folder, prepared, monkeypatch)


def test_small_pieces_give_nearly_the_same_numbers(mistral3, monkeypatch):
    [prepared] = mistral3.family.prepare([tiny_llava.picture(48, 47)], "image")
    check_small_pieces(mistral3, prepared, monkeypatch, "tower", "projector")


def test_a_head_of_a_large_picture_is_more_than_one_piece(mistral3, monkeypatch):
    monkeypatch.setattr("tureen.vision.tower.MIN_ROWS", 1)
    monkeypatch.setattr("tureen.runner.encoder.CPU_PIECE", 4 * 144 * 8 * 10)  # ten queries of 144 patches
    [prepared] = mistral3.family.prepare([tiny_llava.picture(48, 48)], "image")
    tower = load_tiny_encoder(mistral3.folder).each[-1]._embedder._tower
    work = tower._attend(torch.randn(144, 32), "layers.0", None)
    attending = [flops for flops in work if flops % (4 * 144 * 8) == 0 and flops <= 4 * 144 * 8 * 10]
    assert len(attending) == 4 * 15
    assert prepared.num_tokens == 36


def test_without_a_file_for_pictures_the_tower_s_size_is_the_limit(mistral3, tmp_path):
    (tmp_path / "config.json").write_bytes((mistral3.folder / "config.json").read_bytes())
    source = folder_source(tmp_path)
    family = find_family(model_config(source), preprocessor_config(source))
    picture = tiny_llava.picture(100, 60)
    [found], [expected] = family.prepare([picture], "image"), mistral3.family.prepare([picture], "image")
    assert np.array_equal(found.pixels, expected.pixels)
    assert family.normalisation == mistral3.family.normalisation


def test_a_model_without_vision_config_takes_text_only():
    assert is_family({"model_type": "mistral3", "vision_config": {}})
    assert not is_family({"model_type": "mistral3", "vision_config": None})
    assert not is_family({"model_type": "mistral3", "text_config": {}})
    assert is_family({"model_type": "llava"})


BAD_TOWER = {**tiny_pixtral.TOWER, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("variant", "changes", "key"),
    [
        ("mistral-small", {"vision_config": BAD_TOWER}, "hidden_size"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "head_dim": 16}}, "head_dim"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "hidden_act": "tanh"}}, "hidden_act"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "num_channels": 1}}, "num_channels"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "patch_size": [4, 4]}}, "patch_size"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "image_size": 40}}, "size"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "model_type": "siglip_vision_model"}}, "model_type"),
        ("mistral-small", {"vision_config": {**tiny_pixtral.TOWER, "rope_scaling": {"factor": 2}}}, "rope_scaling"),
        (
            "mistral-small",
            {"vision_config": {**tiny_pixtral.TOWER, "rope_parameters": {"rope_type": "yarn"}}},
            "rope_type",
        ),
        ("mistral-small", {"vision_feature_layer": [0, 1]}, "vision_feature_layer"),
        ("mistral-small", {"vision_feature_layer": 4}, "vision_feature_layer"),
        ("mistral-small", {"spatial_merge_size": 0}, "spatial_merge_size"),
        ("mistral-small", {"text_config": {"rms_norm_eps": 0}}, "rms_norm_eps"),
        ("mistral-small", {"multimodal_projector_bias": "no"}, "multimodal_projector_bias"),
        ("mistral-small", {"image_token_index": "x"}, "image_token_index"),
        ("pixtral", {"vision_feature_select_strategy": None}, "vision_feature_select_strategy"),
        ("pixtral", {"model_type": "llava_next"}, "model_type"),
        ("pixtral", {"model_type": "llava_onevision"}, "model_type"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_its_key(tmp_path, variant, changes, key):
    tiny_pixtral.write(tmp_path, variant)
    hf = {**json.loads((tmp_path / "config.json").read_text()), **changes}
    with pytest.raises(StartupError, match=f": {key}: ") as error:
        find_family(hf, tiny_pixtral.VARIANTS[variant].preprocessor)
    assert error.value.field == key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ({"size": {"longest_edge": 49}}, "size"),
        ({"size": None}, "size"),
        ({"size": {"shortest_edge": 40}}, "size"),
        ({"size": {"longest_edge": 40, "height": 40, "width": 40}}, "size"),
        ({"size": 0}, "size"),
        ({"patch_size": 16}, "patch_size"),
        ({"patch_size": {"height": 4, "width": 8}}, "patch_size"),
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"resample": 9}, "resample"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_a_preprocessor_that_cannot_be_honoured_is_refused_by_its_key(mistral3, changes, key):
    source = folder_source(mistral3.folder)
    with pytest.raises(StartupError, match=f"preprocessor_config.json.*: {key}: ") as error:
        find_family(model_config(source), {**preprocessor_config(source), **changes})
    assert error.value.field == key


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 35},
        {"layout": (6, 6)},
        {"pixels": np.zeros((2, 48, 48, 3), np.uint8)},
        {"pixels": np.zeros((1, 48, 44, 3), np.uint8), "num_tokens": 30},
        {"pixels": np.zeros((1, 8, 80, 3), np.uint8), "num_tokens": 10},
        {"pixels": np.zeros((1, 0, 48, 3), np.uint8), "num_tokens": 0},
    ],
)
def test_a_picture_that_cannot_have_been_prepared_fails_alone(mistral3, changes):
    [prepared] = mistral3.family.prepare([tiny_llava.picture(48, 48)], "image")
    assert len(mistral3.family.parts(prepared)) == 7
    hostile = prepared._replace(**changes)
    with pytest.raises(RequestFailed):
        mistral3.family.parts(hostile)
    with pytest.raises(RequestFailed):
        list(mistral3.encoder.encode(item_of(hostile)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_a_quantised_tower_is_refused(mistral3, tmp_path, dtype):
    name = "vision_tower.transformer.layers.0.attention.q_proj.weight"
    weights = load_file(mistral3.folder / WEIGHTS)
    weights[name] = weights[name].to(dtype)
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((mistral3.folder / file).read_bytes())
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(StartupError, match=r"q_proj.weight' has type .*, which cannot be read"):
        load_tiny_encoder(tmp_path)


def test_scales_in_a_tower_are_named_as_the_reason_of_the_refusal(mistral3, tmp_path):
    name = "vision_tower.transformer.layers.0.attention.q_proj.weight_scale_inv"
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((mistral3.folder / file).read_bytes())
    save_file(load_file(mistral3.folder / WEIGHTS) | {name: torch.ones(())}, tmp_path / WEIGHTS)
    with pytest.raises(StartupError, match=r"the vision encoder is quantised \(.*weight_scale_inv\)"):
        load_tiny_encoder(tmp_path)


def test_a_picture_item_of_another_size_fails_alone(mistral3):
    [prepared] = mistral3.family.prepare([tiny_llava.picture(48, 48)], "image")
    with pytest.raises(RequestFailed, match="36 embeddings, not 35"):
        list(mistral3.encoder.encode(msgspec.structs.replace(item_of(prepared), num_tokens=35)))
