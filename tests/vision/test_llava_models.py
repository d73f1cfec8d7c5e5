"""Models that see: embeddings, logits and tokens equal those of transformers, end to end through our text model."""

import functools
import importlib
import sys

import llava_checks
import msgspec
import mutated
import numpy as np
import pytest
import tiny_llava
from llava_checks import (
    check_answer,
    check_embeddings,
    check_encoding_by_turns,
    check_end_to_end,
    check_small_pieces,
    encode,
    expected_answer,
    expected_embeddings,
    load_tiny_encoder,
    make_model,
)
from safetensors.torch import load_file, save_file

from tureen.kernels.cpu import native
from tureen.media.llava_names import local_name
from tureen.registry import declared
from tureen.weights.stored import VISION

MUTATED = ("llava-dinov2-gated", "next-vicuna", "onevision")
"""Variants with all architectures and towers."""
COMPUTING = ("tureen.runner", "tureen.vision", "tureen.weights")


@pytest.fixture(scope="module", params=tiny_llava.VARIANTS)
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def onevision(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("ov"), "onevision")


@pytest.mark.parametrize("size", [(28, 28), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_a_picture_equal_transformers(model, size):
    picture = tiny_llava.picture(*size)
    [prepared] = model.family.prepare([picture], "image")
    [expected] = expected_embeddings(model, [picture], "image")
    check_embeddings(model.encoder, prepared, expected)


def _is_used(kind):
    """Whether a kind of weights changes embeddings: the bias of keys adds the same to all scores of a query."""
    is_of_keys = kind.endswith(("k_proj.bias", "key.bias"))
    return kind.startswith(VISION) and not is_of_keys and local_name(kind.replace("*", "0"), 1) is not None


@pytest.mark.parametrize("model", MUTATED, indirect=True)
def test_noise_in_any_weight_of_the_part_that_sees_is_noticed(model, tmp_path):
    picture = tiny_llava.picture(28, 28)
    [prepared] = model.family.prepare([picture], "image")
    [expected] = expected_embeddings(model, [picture], "image")
    unnoticed = []
    for kind in mutated.folders_with_noise(model.folder, tmp_path, _is_used):
        encoder = load_tiny_encoder(tmp_path)
        try:
            check_embeddings(encoder, prepared, expected)
        except AssertionError:
            continue
        unnoticed.append(kind)
    assert unnoticed == []


def test_every_architecture_with_pictures_is_tested_with_noise():
    families = {f"{tiny_llava.VARIANTS[variant][0]}ForConditionalGeneration" for variant in MUTATED}
    known = declared("tureen.models", "ARCHITECTURES")
    with_pictures = {name for name in known if name.startswith("Llava")}  # others have files of their own
    assert families == with_pictures
    assert {tiny_llava.VARIANTS[variant][1] for variant in MUTATED} == {one[1] for one in tiny_llava.VARIANTS.values()}


def test_tokens_after_one_picture_equal_transformers(model):
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image")


def test_tokens_after_several_pictures_equal_transformers(model):
    pictures = [tiny_llava.picture(57, 31), tiny_llava.picture(40, 90, seed=3)]
    check_end_to_end(model, pictures, "multi-images")


def test_tokens_after_a_video_equal_transformers(onevision):
    frames = [tiny_llava.picture(50, 40, seed) for seed in range(3)]
    [prepared] = onevision.family.prepare(frames, "video")
    check_embeddings(onevision.encoder, prepared, expected_embeddings(onevision, frames, "video")[0])
    check_end_to_end(onevision, frames, "video")


def test_tokens_are_the_same_with_torch_and_in_chunks_that_cut_a_picture(onevision):
    pictures = [tiny_llava.picture(113, 112)]
    check_end_to_end(onevision, pictures, "image", kernels="torch")
    check_end_to_end(onevision, pictures, "image", kernels="torch", chunk=5)


def _import_again_without_torch(monkeypatch):
    """What computes is imported again when it is next asked for, and finds no torch."""
    for name, module in list(sys.modules.items()):
        parent, _, child = name.rpartition(".")
        if name.partition(".")[0] in ("torch", "transformers"):
            monkeypatch.setitem(sys.modules, name, None)
        elif parent in COMPUTING or (name.startswith("tureen.") and hasattr(module, "torch")):
            monkeypatch.setattr(sys.modules[parent], child, module)
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
@pytest.mark.parametrize("modality", ["image", "video"])
def test_a_model_that_sees_answers_where_torch_cannot_be_imported(onevision, modality, monkeypatch):
    pictures = [tiny_llava.picture(57, 31, seed) for seed in range(1 + (modality == "video"))]
    expected = expected_answer(onevision, pictures, modality)
    _import_again_without_torch(monkeypatch)
    for name, module in (("load_encoder", "encoder"), ("load_runner", "load")):
        monkeypatch.setattr(llava_checks, name, getattr(importlib.import_module(f"tureen.runner.{module}"), name))
    encoder = load_tiny_encoder(onevision.folder, each=("native",))
    check_answer(msgspec.structs.replace(onevision, encoder=encoder), pictures, modality, expected, kernels="native")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tureen.vision.torch_arrays")


def test_a_large_picture_is_reduced_to_the_features_that_the_config_allows(onevision):
    picture = tiny_llava.picture(1000, 1000)
    [prepared] = onevision.family.prepare([picture], "image")
    assert len(prepared.pixels) == 1 + 16
    assert prepared.num_tokens < 16 * (1 + 3) + 8
    check_embeddings(onevision.encoder, prepared, expected_embeddings(onevision, [picture], "image")[0])


def _renamed(folder, rename):
    weights = load_file(folder / "model.safetensors")
    save_file({rename(name): weight for name, weight in weights.items()}, folder / "model.safetensors")


def _newer(name):
    name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
    is_plain = name.startswith(("vision_tower.", "multi_modal_projector.", "image_newline"))
    return f"model.{name}" if is_plain else name


@pytest.mark.parametrize(
    "rename",
    [_newer, lambda name: name.replace("vision_tower.", "vision_tower.vision_model.")],
    ids=["newer", "older"],
)
@pytest.mark.parametrize("variant", ["next-vicuna", "onevision"])
def test_checkpoints_with_other_names_are_the_same_model(tmp_path, variant, rename):
    model = make_model(tmp_path, variant)
    _renamed(tmp_path, rename)
    model.encoder = load_tiny_encoder(tmp_path)
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image", kernels="torch")


def test_a_16_bit_checkpoint_is_computed_in_float32(tmp_path):
    model = make_model(tmp_path, "llava-clip")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    model.oracle.bfloat16().float()
    model.encoder = load_tiny_encoder(tmp_path)
    picture = tiny_llava.picture(57, 31)
    [prepared] = model.family.prepare([picture], "image")
    check_embeddings(model.encoder, prepared, expected_embeddings(model, [picture], "image")[0])


def test_pictures_that_are_encoded_by_turns_get_the_numbers_of_each_alone(onevision, monkeypatch):
    prepared = [onevision.family.prepare([tiny_llava.picture(*size)], "image")[0] for size in ((57, 31), (113, 112))]
    check_encoding_by_turns(onevision.folder, prepared, monkeypatch)


def test_small_pieces_give_nearly_the_same_numbers(onevision, monkeypatch):
    [prepared] = onevision.family.prepare([tiny_llava.picture(113, 112)], "image")
    check_small_pieces(onevision, prepared, monkeypatch, "tower", "projector")


def test_random_weights_load_without_a_checkpoint(onevision):
    (onevision.folder / "empty").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (onevision.folder / "empty" / name).write_bytes((onevision.folder / name).read_bytes())
    [prepared] = onevision.family.prepare([tiny_llava.picture(57, 31)], "image")
    embed = functools.partial(encode, prepared=prepared)
    found = [embed(load_tiny_encoder(onevision.folder / "empty", load_format="dummy")) for _ in range(2)]
    assert np.isfinite(found[0]).all()
    assert np.array_equal(*found)
