"""Idefics3 and SmolVLM: prompts, embeddings, logits and tokens equal those of transformers."""

import json

import msgspec
import mutated
import numpy as np
import pytest
import tiny_idefics3
import tiny_models
import torch
import transformers
from idefics3_checks import PICTURES, TEXTS, check_end_to_end, expected_embeddings, make_model
from llava_checks import (
    check_embeddings,
    check_encoding_by_turns,
    check_small_pieces,
    encode,
    item_of,
    load_tiny_encoder,
)
from safetensors.torch import load_file, save_file
from tiny_llava import picture

from tureen.errors import RequestFailed, StartupError
from tureen.media.families import find_family
from tureen.media.idefics3_vision import parse_vision
from tureen.runner.loading import describe
from tureen.vision.idefics3 import in_buckets
from tureen.weights.stored import VISION


@pytest.fixture(scope="module", params=tiny_idefics3.VARIANTS)
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("smolvlm"), "smolvlm")


@pytest.mark.parametrize("size", [(28, 28), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_a_picture_equal_transformers(model, size):
    shown = picture(*size)
    [prepared] = model.family.prepare([shown], "image")
    check_embeddings(model.encoder, prepared, expected_embeddings(model, [shown]))


@pytest.mark.parametrize("count", TEXTS)
def test_tokens_after_pictures_equal_transformers(model, count):
    check_end_to_end(model, count)


def test_tokens_are_the_same_with_torch_and_in_chunks_that_cut_a_picture(smolvlm):
    check_end_to_end(smolvlm, 2, kernels="torch")
    check_end_to_end(smolvlm, 2, kernels="torch", chunk=5)


def _is_used(kind):
    """Whether a kind of weights changes embeddings: the bias of keys adds the same to all scores of a query."""
    return kind.startswith(VISION) and not kind.endswith("k_proj.bias")


@pytest.mark.parametrize("model", ["smolvlm", "idefics3"], indirect=True)
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
    kept = {kind for kind in kinds if not kind.startswith(("model.text_model.", "lm_head."))}
    assert kept == {"model.vision_model.encoder.layers.*.self_attn.k_proj.bias"}


def test_pieces_and_pauses_do_not_change_the_numbers(smolvlm, monkeypatch):
    prepared = [smolvlm.family.prepare([shown], "image")[0] for shown in PICTURES[:2]]
    check_encoding_by_turns(smolvlm.folder, prepared, monkeypatch, piece=30_000)
    check_small_pieces(smolvlm, prepared[0], monkeypatch, "tower", "projector")


@pytest.mark.parametrize("side", [1, 19, 25, 26, 27, 29, 32, 70])
def test_positions_of_patches_are_those_of_transformers(side):
    config = transformers.Idefics3VisionConfig(hidden_size=4, image_size=2 * side, patch_size=2)
    embeddings = transformers.models.idefics3.modeling_idefics3.Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        mask = torch.ones(1, side, side, dtype=torch.bool)
        [expected] = embeddings(torch.zeros(1, 3, 2 * side, 2 * side), mask)
        weight = embeddings.position_embedding.weight
        assert torch.equal(weight[in_buckets(side)], expected)
        assert torch.equal(weight, expected) == (side not in (19, 25, 29))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": ()},
        {"layout": (0, 0)},
        {"layout": (2, 3)},
        {"layout": (-2, -2)},
        {"shape": (5, 28, 14, 3), "pixels": bytes(5 * 28 * 14 * 3)},
        {"shape": (5, 56, 56, 3), "pixels": bytes(5 * 56 * 56 * 3)},
        {"num_tokens": 19},
    ],
)
def test_an_item_that_no_family_makes_fails_alone(smolvlm, changes):
    [prepared] = smolvlm.family.prepare([picture(60, 60)], "image")
    item = msgspec.structs.replace(item_of(prepared._replace(num_tokens=20, pixels=prepared.pixels[:5], layout=(2, 2))))
    with pytest.raises(RequestFailed):
        list(smolvlm.encoder.encode(msgspec.structs.replace(item, **changes)))
    assert len(list(smolvlm.encoder.encode(item))[-1]) == 20 * 64 * 4


def _rewritten(model, folder, change):
    weights = load_file(model.folder / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (folder / name).write_bytes((model.folder / name).read_bytes())
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.vision_model.encoder.layers.2.layer_norm1.weight", "has a weight that its architecture does not"),
        ("model.vision_model.head.probe", "has a weight that its architecture does not"),
        ("model.vision_model.pre_layrnorm.weight", r"tower.input_norm.weight has shape \[64\]"),
        ("model.connector.modality_projection.proj.bias", "has a weight that its architecture does not"),
        ("model.connector.perceiver_resampler.latents", "has a weight that its architecture does not"),
        ("model.vision_model.post_layernorm.weight", r"norm.weight has shape \[64\]"),
        (None, "lacks 1 weights of the vision encoder, such as norm.bias"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(smolvlm, tmp_path, name, message):
    def change(weights):
        if name is None:
            del weights["model.vision_model.post_layernorm.bias"]
            return weights
        return weights | {name: torch.zeros(64)}

    _rewritten(smolvlm, tmp_path, change)
    with pytest.raises(StartupError, match=message):
        load_tiny_encoder(tmp_path)


def test_a_checkpoint_saved_without_the_first_prefix_is_the_same_model(smolvlm, tmp_path):
    _rewritten(smolvlm, tmp_path, lambda weights: {name.removeprefix("model."): one for name, one in weights.items()})
    [prepared] = smolvlm.family.prepare(PICTURES[:1], "image")
    encoder = load_tiny_encoder(tmp_path)
    assert np.array_equal(encode(encoder, prepared), encode(smolvlm.encoder, prepared))
    check_end_to_end(msgspec.structs.replace(smolvlm, folder=tmp_path, encoder=encoder), 1)


@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
@pytest.mark.parametrize("text", [None, {}, {"model_type": "llama", "num_hidden_layers": 3}, {"head_dim": 64}])
@pytest.mark.parametrize("tie", [{}, {"tie_word_embeddings": True}])
def test_keys_that_a_config_leaves_out_have_the_values_of_transformers(family, text, tie):
    config = getattr(transformers, f"{family}Config")(text_config=text and dict(text), **tie)
    if text == {}:
        config = getattr(transformers, f"{family}Config")(text_config={"model_type": "llama"}, **tie)
    whole = config.text_config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    whole["tie_word_embeddings"] = config.tie_word_embeddings
    hf = {"architectures": [f"{family}ForConditionalGeneration"], "text_config": text, **tie}
    assert describe(hf) == describe(whole)


def test_keys_that_a_tower_leaves_out_have_the_values_of_transformers():
    eye = {"image_size": 256}
    hf = {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "vision_config": eye}
    whole = json.loads(transformers.SmolVLMConfig(vision_config=dict(eye)).to_json_string(use_diff=False))
    assert len(whole["vision_config"]) > 10
    assert parse_vision(hf) == parse_vision(whole)
    family = find_family(hf, {"max_image_size": {"longest_edge": 256}})
    assert family.placeholder_id == whole["image_token_id"] == 128257


def test_the_head_is_that_of_the_whole_model():
    text = {**tiny_models.SHAPE, "model_type": "llama", "tie_word_embeddings": True}
    for outer in (True, False):
        hf = {"architectures": ["SmolVLMForConditionalGeneration"], "text_config": text, "tie_word_embeddings": outer}
        config = transformers.SmolVLMConfig(text_config=dict(text), tie_word_embeddings=outer)
        assert describe(hf).tie_embeddings == config.tie_word_embeddings == outer
