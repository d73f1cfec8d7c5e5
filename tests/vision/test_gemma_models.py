"""Gemma 3 and 4: prompts, embeddings, logits and tokens equal those of transformers, though pictures are seen whole."""

import itertools
import random
from importlib import import_module

import msgspec
import mutated
import numpy as np
import pytest
import tiny_gemma
import torch
from gemma_checks import PICTURES, TEXTS, check_end_to_end, expected_embeddings, generated, make_model
from llava_checks import (
    check_embeddings,
    check_encoding_by_turns,
    check_small_pieces,
    item_of,
    load_tiny_encoder,
)
from runner_driver import folder_source
from safetensors.torch import load_file
from tiny_llava import picture
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from tureen.contract.types import PICTURE
from tureen.errors import InvalidRequest, RequestFailed, StartupError
from tureen.media.base import Prepared
from tureen.media.families import find_family, is_family
from tureen.media.gemma3 import parse_vision
from tureen.media.gemma4 import grid_of
from tureen.registry import find_model
from tureen.requests.media_fields import PromptMedia, check_count
from tureen.runner.loading import architecture_of, describe
from tureen.vision.arrays import is_matrix
from tureen.vision.torch_arrays import TorchArrays
from tureen.weights.source import model_config, preprocessor_config
from tureen.weights.stored import VISION
from tureen.weights.tensors import as_tensor
from tureen.weights.vision import iter_vision


@pytest.fixture(scope="module", params=tiny_gemma.VARIANTS)
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gemma4"), "gemma4")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.mark.parametrize("size", [(28, 28), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_a_picture_equal_transformers(model, size):
    shown = picture(*size)
    [prepared] = model.family.prepare([shown], "image")
    check_embeddings(model.encoder, prepared, expected_embeddings(model, [shown]))


@pytest.mark.parametrize("count", TEXTS)
def test_tokens_after_pictures_equal_transformers(model, count):
    check_end_to_end(model, count)


@pytest.mark.parametrize("changes", [{}, {"num_threads": 2}, {"kernels": "torch"}])
def test_tokens_are_the_same_in_chunks_that_end_after_a_picture(model, changes):
    check_end_to_end(model, 2, chunk=5, beside=True, **changes)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("model", ["gemma3", "gemma3-long", "gemma4"], indirect=True)
def test_chunks_and_a_prefix_that_ends_inside_a_picture_give_the_same_bits(model, kernels):
    prompt, expected = generated(model, 2, kernels=kernels)
    assert generated(model, 2, kernels=kernels, chunk=5)[1] == expected
    for item in prompt.media:
        assert generated(model, 2, kernels=kernels, again_from=item.start + 4)[1] == expected


@pytest.mark.parametrize(
    "changes", [{"kernels": "tree"}, {"num_ranks": 2}, {"num_ranks": 2, "pipeline_parallel_size": 2}]
)
@pytest.mark.parametrize("model", ["gemma3", "gemma3-long"], indirect=True)
def test_tokens_are_the_same_on_several_ranks(model, changes):
    check_end_to_end(model, 2, chunk=5, beside=True, **changes)


def _is_used(kind):
    """Whether a kind of weights changes embeddings: the bias of keys adds the same to all scores of a query."""
    return kind.startswith(VISION) and not kind.endswith("k_proj.bias")


@pytest.mark.parametrize("model", ["gemma3", "gemma4", "gemma4-causal"], indirect=True)
def test_noise_in_any_weight_of_the_part_that_sees_is_noticed(model, tmp_path):
    [prepared] = model.family.prepare(PICTURES[:1], "image")
    expected = expected_embeddings(model, PICTURES[:1])
    unnoticed, kinds = [], list(mutated.kinds(load_file(model.folder / "model.safetensors")))
    for kind in mutated.folders_with_noise(model.folder, tmp_path, _is_used):
        kinds.remove(kind)
        try:
            check_embeddings(load_tiny_encoder(tmp_path), prepared, expected)
        except AssertionError:
            continue
        unnoticed.append(kind)
    assert unnoticed == []
    kept = {kind for kind in kinds if not kind.startswith(("language_model.", "model.language_model.", "lm_head."))}
    assert kept <= {"vision_tower.encoder.layers.*.self_attn.k_proj.bias"}


@pytest.mark.parametrize("model", ["gemma3", "gemma4-causal"], indirect=True)
def test_pieces_and_pauses_do_not_change_the_numbers(model, monkeypatch):
    prepared = [model.family.prepare([shown], "image")[0] for shown in PICTURES[:2]]
    check_encoding_by_turns(model.folder, prepared, monkeypatch, piece=30_000)
    check_small_pieces(model, prepared[0], monkeypatch, "tower", "projector")


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": (1,)},
        {"shape": (2, 24, 24, 3), "pixels": bytes(2 * 24 * 24 * 3)},
        {"shape": (1, 24, 28, 3), "pixels": bytes(24 * 28 * 3)},
        {"num_tokens": 8},
    ],
)
def test_an_item_that_no_family_makes_fails_alone(gemma3, changes):
    [prepared] = gemma3.family.prepare([picture(60, 60)], "image")
    item = item_of(prepared)
    with pytest.raises(RequestFailed):
        list(gemma3.encoder.encode(msgspec.structs.replace(item, **changes)))
    assert len(list(gemma3.encoder.encode(item))[-1]) == 9 * 64 * 4
    with pytest.raises(RequestFailed, match="9 tokens, not 8"):
        gemma3.family.parts(prepared._replace(num_tokens=8))


def test_the_grid_of_a_picture_is_that_of_transformers():
    rng = random.Random(4)
    for most, side in itertools.product((70, 280, 1120), (6, 48)):
        for _ in range(300):
            size = rng.choice([(rng.randrange(1, 3000), rng.randrange(1, 3000)), (1, rng.randrange(1, 30_000))])
            size = size[:: rng.choice([1, -1])]
            height, width = get_aspect_ratio_preserving_size(*size, side // 3, most * 9, 3)
            assert grid_of(size, side, most) == (height // side, width // side)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": (1,)},
        {"shape": (2, 18, 24, 3), "pixels": bytes(2 * 18 * 24 * 3)},
        {"shape": (1, 18, 23, 3), "pixels": bytes(18 * 23 * 3)},
        {"shape": (1, 6, 6 * 71, 3), "pixels": bytes(6 * 6 * 71 * 3)},
        {"num_tokens": 8},
    ],
)
def test_an_item_that_gemma_4_does_not_make_fails_alone(gemma4, changes):
    prepared = Prepared(np.zeros((1, 18, 24, 3), np.uint8), 12)
    item = msgspec.structs.replace(item_of(prepared), **changes)
    with pytest.raises(RequestFailed):
        list(gemma4.encoder.encode(item))
    if item.layout == ():
        pixels = np.zeros(item.shape, np.uint8)
        with pytest.raises(RequestFailed, match="tokens are not those of a picture of"):
            gemma4.family.parts(Prepared(pixels, item.num_tokens))
    assert len(list(gemma4.encoder.encode(item_of(prepared)))[-1]) == 12 * 64 * 4
    assert [part.num_tokens for part in gemma4.family.parts(prepared)] == [12, 0]


def test_layers_with_a_window_alone_see_pictures_of_gemma_4_whole(gemma4):
    config = model_config(folder_source(gemma4.folder))
    model = describe(config)
    assert [model.sees_picture_whole(layer) for layer in range(4)] == [True, False, True, False]
    config["text_config"]["use_bidirectional_attention"] = None
    assert describe(config).whole_pictures is None
    family = find_family(config, tiny_gemma.preprocessor("gemma4"))
    assert not any(part.is_whole for part in family.parts(Prepared(np.zeros((1, 18, 24, 3), np.uint8), 12)))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"num_key_value_heads": 2}, "num_key_value_heads: must be num_attention_heads, 4"),
        ("vision_config", {"head_dim": 6}, "head_dim: 6 has no halves"),
        ("vision_config", {"attention_bias": True}, "attention_bias: true is not supported"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "'siglip_vision_model' is not supported"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type: 'yarn' is not supported"),
        ("vision_config", {"position_embedding_size": 100}, "max_soft_tokens: 210 patches in a row have no place"),
        ("text_config", {"pad_token_id": 3}, "pad_token_id: must be 0"),
        ("", {"max_soft_tokens": 71}, "max_soft_tokens: 71 is not one of 70, 140"),
        ("", {"do_resize": False}, "do_resize: must be true"),
        ("", {"patch_size": 16}, "patch_size: must be that of config.json's vision_config, 2"),
        ("", {"pooling_kernel_size": 4}, "pooling_kernel_size: must be that"),
        ("", {"image_processor_type": "Gemma3ImageProcessor"}, "'Gemma3ImageProcessor' is not supported"),
    ],
)
def test_configs_of_gemma_4_that_would_run_wrong_are_refused(gemma4, part, changes, message):
    config, preprocessor = model_config(folder_source(gemma4.folder)), tiny_gemma.preprocessor("gemma4")
    (config[part] if part else preprocessor).update(changes)
    with pytest.raises(StartupError, match=message):
        find_family(config, preprocessor)


def test_a_normalisation_of_the_file_comes_before_the_model_s_own(gemma4):
    changes = {
        "do_normalize": True,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.4, 0.2],
        "rescale_factor": 0.01,
    }
    family = find_family(model_config(folder_source(gemma4.folder)), tiny_gemma.preprocessor("gemma4") | changes)
    [prepared] = family.prepare(PICTURES[:1], "image")
    scale, mean, std = (np.array(values) for values in family.normalisation)
    found = (prepared.pixels[0] * scale - mean) / std
    expected = tiny_gemma.image_processor("gemma4", **changes)(PICTURES[:1], return_tensors="np")["pixel_values"][0]
    assert np.allclose(found[:2, :2].reshape(-1), 2 * (expected[0] - 0.5), atol=1e-5)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config", {"mm_tokens_per_image": 8}, "mm_tokens_per_image: 8 must be a square"),
        ("config", {"mm_tokens_per_image": 16}, "mm_tokens_per_image: 16 must be a square"),
        ("config", {"mm_tokens_per_image": 49}, "mm_tokens_per_image: 49 must be a square"),
        ("config", {"vision_config": {"model_type": "clip_vision_model"}}, "'clip_vision_model' is not supported"),
        ("config", {"boi_token_index": "x"}, "boi_token_index: must be a positive integer"),
        ("preprocessor", {"do_pan_and_scan": True}, "do_pan_and_scan: is not supported"),
        (
            "preprocessor",
            {"size": {"height": 20, "width": 24}},
            "size: must make pictures of the encoder's size: 24 x",
        ),
        ("preprocessor", {"image_processor_type": "SiglipImageProcessor"}, "'SiglipImageProcessor' is not supported"),
    ],
)
def test_configs_that_would_run_wrong_are_refused(gemma3, file, changes, message):
    source = folder_source(gemma3.folder)
    config, preprocessor = model_config(source), preprocessor_config(source)
    (config if file == "config" else preprocessor).update(changes)
    with pytest.raises(StartupError, match=message):
        find_family(config, preprocessor)


def test_a_prompt_in_which_pictures_are_put_already_is_refused(gemma3):
    text = TEXTS[1].replace("*", gemma3.family.placeholder)
    ids = tiny_gemma.inputs(gemma3.variant, text, PICTURES[:1])["input_ids"][0].tolist()
    media = PromptMedia(("0",), (), "image", "image_data", "video_data")
    marked = [PICTURE if token == tiny_gemma.START else token for token in ids]
    with pytest.raises(InvalidRequest, match="has token 250, which is a placeholder for a picture's embeddings"):
        check_count(marked, media, "input_ids", gemma3.family)
    check_count([token for token in marked if token != tiny_gemma.IMAGE], media, "input_ids", gemma3.family)


def _embeddings_in(dtype, model, pixels):
    """What a tower makes of pixels in torch with this type; its weights fit into bfloat16, and a mean is large."""
    source = folder_source(model.folder)
    vision = find_model(architecture_of(model_config(source))).parse_vision(model_config(source))
    arrays, weights = TorchArrays(torch.device("cpu"), dtype), {}
    for stored in iter_vision(source):
        name = vision.local_name(stored.name)
        values = as_tensor(stored).reshape(vision.weights(64)[name]).bfloat16().to(dtype)
        if name == "positions":  # features have a mean of 20, which std_bias takes away
            values = values + 10
        if name == "std_bias":
            values = torch.full_like(values, 20 * len(values) ** 0.5)
        weights[name] = arrays.matrix(values) if is_matrix(name, values.shape) else values
    work = import_module(vision.module).make(vision, arrays, weights, 1 << 40).embed(pixels.to(dtype), ())
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@torch.no_grad()
@pytest.mark.parametrize("model", ["gemma3", "gemma4"], indirect=True)
def test_towers_in_bfloat16_are_near_those_in_float32(model):
    pixels = torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    found, expected = (_embeddings_in(dtype, model, pixels) for dtype in (torch.bfloat16, torch.float32))
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.035 * expected.norm()  # twice as far where sums are narrow


def test_a_text_model_of_the_family_takes_no_pictures_and_needs_no_room_for_them(gemma3):
    config = model_config(folder_source(gemma3.folder))
    assert is_family(config)
    assert describe(config).whole_pictures == ("all", 9)
    assert describe(config | {"vision_config": {}}).whole_pictures == ("all", 9)
    del config["vision_config"]
    assert not is_family(config)
    assert describe(config).whole_pictures is None


def test_keys_that_a_config_leaves_out_have_the_values_of_the_published_ones():
    tower = {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
    assert parse_vision({"vision_config": tower}).num_tokens == 256
    family = find_family({"model_type": "gemma3", "vision_config": tower}, {"size": {"height": 896, "width": 896}})
    assert family.placeholder_id == 255999
    assert family.prepare([picture(9, 5)], "image")[0].pixels.shape == (1, 896, 896, 3)
