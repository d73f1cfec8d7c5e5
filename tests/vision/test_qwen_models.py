"""Qwens that see: pixels, embeddings, log-probabilities and tokens equal those of transformers."""

import json

import mutated
import numpy as np
import pytest
import tiny_llava
import tiny_qwen_vl
from llava_checks import (
    CLOSE,
    check_embeddings,
    check_encoding_by_turns,
    check_small_pieces,
    encode,
    load_tiny_encoder,
)
from qwen_checks import PICTURES, check_end_to_end, expected_embeddings, make_model
from runner_driver import folder_source
from safetensors.torch import load_file, save_file

from tureen.config import Config
from tureen.contract.types import MediaItem
from tureen.errors import RequestFailed, StartupError
from tureen.media.base import Prepared
from tureen.media.families import find_family
from tureen.runner.load import load_runner
from tureen.weights.stored import VISION


@pytest.fixture(scope="module", params=tiny_qwen_vl.VARIANTS)
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("size", tiny_qwen_vl.SIZES)
def test_pixels_are_those_of_transformers(model, size):
    picture = tiny_llava.picture(*size)
    [prepared] = model.family.prepare([picture], "image")
    expected = tiny_qwen_vl.processor()([picture], return_tensors="np")
    _, rows, columns = expected["image_grid_thw"][0]
    assert prepared.pixels.shape == (1, 4 * rows, 4 * columns, 3)
    [part] = model.family.parts(prepared)
    assert part.grid == (rows // 2, columns // 2)
    scale, mean, std = (np.array(values) for values in model.family.normalisation)
    found = ((prepared.pixels[0] * scale - mean) / std).reshape(rows // 2, 2, 4, columns // 2, 2, 4, 3)
    patches = found.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, 16).repeat(2, axis=2)
    assert np.abs(patches.reshape(len(patches), -1) - expected["pixel_values"]).max() < 1e-5


@pytest.mark.parametrize("size", [(32, 32), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_a_picture_equal_transformers(model, size):
    picture = tiny_llava.picture(*size)
    [prepared] = model.family.prepare([picture], "image")
    check_embeddings(model.encoder, prepared, expected_embeddings(model, picture))


@pytest.mark.parametrize("model", ["qwen2", "qwen2.5", "qwen3", "qwen3.5"], indirect=True)
def test_noise_in_any_weight_of_the_part_that_sees_is_noticed(model, tmp_path):
    picture = tiny_llava.picture(57, 31)
    [prepared] = model.family.prepare([picture], "image")
    expected = expected_embeddings(model, picture)
    unnoticed = []
    for kind in mutated.folders_with_noise(model.folder, tmp_path, lambda kind: kind.startswith(VISION)):
        encoder = load_tiny_encoder(tmp_path)
        if np.abs(encode(encoder, prepared) - expected).max() < CLOSE * np.abs(expected).max():
            unnoticed.append(kind)
    assert unnoticed == []


@pytest.mark.parametrize("model", ["qwen2.5", "qwen3"], indirect=True)
def test_pieces_and_pauses_do_not_change_the_numbers(model, monkeypatch):
    prepared = model.family.prepare(PICTURES, "multi-images")
    check_encoding_by_turns(model.folder, prepared, monkeypatch, piece=20_000)
    check_small_pieces(model, prepared[0], monkeypatch, "tower", "qwen")


def test_tokens_after_a_text_equal_transformers(model):
    check_end_to_end(model, [])


def test_tokens_after_one_picture_equal_transformers(model):
    check_end_to_end(model, PICTURES[:1])


def test_tokens_after_several_pictures_equal_transformers(model):
    check_end_to_end(model, PICTURES)


def test_tokens_are_the_same_in_torch_in_chunks_that_cut_a_picture_and_beside_a_text(model):
    check_end_to_end(model, PICTURES, beside=True, chunk=5)
    check_end_to_end(model, PICTURES, kernels="torch")
    check_end_to_end(model, PICTURES, kernels="torch", beside=True, chunk=5)


@pytest.mark.parametrize(
    "changes",
    [{"num_threads": 2}, {"kernels": "tree"}, {"num_ranks": 2}, {"num_ranks": 2, "pipeline_parallel_size": 2}],
    ids=["threads", "tree", "ranks", "stages"],
)
@pytest.mark.parametrize("model", ["qwen2.5", "qwen3"], indirect=True)
def test_tokens_are_the_same_wherever_layers_are_computed(model, changes):
    check_end_to_end(model, PICTURES, beside=True, chunk=5, **changes)


def test_experts_are_read_as_published_with_inputs_before_outputs(tmp_path):
    model = make_model(tmp_path, "qwen3-moe")
    weights = load_file(tmp_path / "model.safetensors")
    turned = {name: weight.mT.contiguous() if ".mlp.experts." in name else weight for name, weight in weights.items()}
    assert any(".mlp.experts." in name for name in turned)
    save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    check_end_to_end(model, PICTURES[:1])
    check_end_to_end(model, [], kernels="torch")


EYE, ROPE = ("vision_config",), ("text_config", "rope_parameters")


@pytest.mark.parametrize(
    ("variant", "path", "changes", "key"),
    [
        ("qwen2", EYE, {"embed_dim": 36}, "embed_dim"),
        ("qwen2", EYE, {"hidden_size": 32}, "hidden_size"),
        ("qwen2", EYE, {"mlp_ratio": 0.001}, "mlp_ratio"),
        ("qwen2.5", EYE, {"hidden_size": 36}, "hidden_size"),
        ("qwen2.5", EYE, {"in_channels": 1}, "in_channels"),
        ("qwen2.5", EYE, {"window_size": 7}, "window_size"),
        ("qwen2.5", EYE, {"fullatt_block_indexes": "x"}, "fullatt_block_indexes"),
        ("qwen2.5", EYE, {"hidden_act": "tan"}, "hidden_act"),
        ("qwen2.5", EYE, {"spatial_merge_size": 0}, "spatial_merge_size"),
        ("qwen2.5", EYE, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("qwen2.5", EYE, {"out_hidden_size": 32}, "out_hidden_size"),
        ("qwen2.5", ROPE, {"mrope_section": [2, 3, 4]}, "mrope_section"),
        ("qwen2.5", ROPE, {"mrope_section": [9, 3, -4]}, "mrope_section"),
        ("qwen2.5", ROPE, {"mrope_section": 8}, "mrope_section"),
        ("qwen2.5", ROPE, {"mrope_interleaved": True}, "mrope_interleaved"),
        ("qwen3", EYE, {"num_position_embeddings": 35}, "num_position_embeddings"),
        ("qwen3", EYE, {"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
        ("qwen3", EYE, {"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes"),
        ("qwen3", EYE, {"depth": 4, "deepstack_visual_indexes": [0, 1, 2, 3]}, "deepstack_visual_indexes"),
        ("qwen3.5", EYE, {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"),
        ("qwen3.5", ROPE, {"mrope_interleaved": False}, "mrope_interleaved"),
        ("qwen3.5", (), {"image_token_id": -1}, "image_token_id"),
    ],
)
def test_a_config_that_would_run_wrong_is_refused_naming_the_key(tmp_path, variant, path, changes, key):
    tiny_qwen_vl.write(tmp_path, variant)
    whole = part = json.loads((tmp_path / "config.json").read_text())
    for name in path:
        part = part[name]
    part.update(changes)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(StartupError, match=rf"config\.json.*{key}"):
        load_runner(folder_source(tmp_path), Config(device="cpu", max_total_tokens=256, num_threads=1)).close()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ({"patch_size": 5}, "patch_size"),
        ({"merge_size": 3}, "merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 9}, "resample"),
        ({"size": {"shortest_edge": 16, "longest_edge": 63}}, "size"),
        ({"max_pixels": 63}, "max_pixels"),
        ({"size": {"shortest_edge": 8192, "longest_edge": 4096}}, "size"),
        ({"size": 7}, "size"),
        ({"min_pixels": "many"}, "min_pixels"),
        ({"image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_a_processor_that_would_prepare_pictures_wrongly_is_refused_naming_the_key(model, changes, key):
    hf = json.loads((model.folder / "config.json").read_text())
    with pytest.raises(StartupError, match=rf"preprocessor_config\.json.*{key}"):
        find_family(hf, tiny_qwen_vl.PREPROCESSOR | changes)


def test_a_folder_without_the_processors_file_says_what_is_missing(model):
    with pytest.raises(StartupError, match=r"preprocessor_config\.json.*is missing.*download it again"):
        find_family(json.loads((model.folder / "config.json").read_text()), {})


@pytest.mark.parametrize("shape", [(2, 32, 32, 3), (1, 30, 32, 3), (1, 32, 4, 3)])
def test_pixels_that_no_picture_becomes_are_refused(model, shape):
    pixels = np.zeros(shape, np.uint8)
    with pytest.raises(RequestFailed):
        model.family.parts(Prepared(pixels, 16))
    with pytest.raises(RequestFailed):
        list(model.encoder.encode(MediaItem("", 0, 16, pixels.tobytes(), shape)))


def test_older_files_have_the_limits_of_a_pictures_size_beside_it(model):
    hf = json.loads((model.folder / "config.json").read_text())
    older = {key: value for key, value in tiny_qwen_vl.PREPROCESSOR.items() if key != "size"}
    family = find_family(hf, older | {"min_pixels": 256, "max_pixels": 4096})
    for size in tiny_qwen_vl.SIZES:
        [found], [wanted] = (one.prepare([tiny_llava.picture(*size)], "image") for one in (family, model.family))
        assert (found.pixels == wanted.pixels).all()
