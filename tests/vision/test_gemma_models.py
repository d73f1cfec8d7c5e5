"""Gemma 3: prompts, embeddings, logits and tokens equal those of transformers, though pictures are seen whole."""

import asyncio
from types import SimpleNamespace

import msgspec
import mutated
import numpy as np
import pytest
import tiny_gemma
import torch
from llava_checks import (
    NEW_TOKENS,
    Model,
    check_embeddings,
    check_encoding_by_turns,
    check_small_pieces,
    generate,
    item_of,
    load_tiny_encoder,
)
from runner_driver import folder_source
from safetensors.torch import load_file
from tiny_llava import picture

from tureen.contract.types import NO_TOKEN
from tureen.errors import RequestFailed, StartupError
from tureen.media.families import find_family, is_family
from tureen.media.gemma3 import parse_vision
from tureen.requests import tokenising
from tureen.requests.media_fields import PromptMedia, picture_modality
from tureen.requests.prompts import Texts
from tureen.runner.loading import describe
from tureen.weights.source import model_config, preprocessor_config

TEXTS = {
    1: "Look:\n<start_of_image>\nwhat?",
    2: "<start_of_image> and\n\n<start_of_image>is",
    3: "a<start_of_image><start_of_image>\n\n<start_of_image>",
}
PICTURES = [picture(57, 31), picture(40, 90, seed=3), picture(30, 30, seed=5)]


@pytest.fixture(scope="module", params=tiny_gemma.VARIANTS)
def model(request, tmp_path_factory):
    return _make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return _make_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


def _make_model(folder, variant):
    oracle = tiny_gemma.write(folder, variant)
    source = folder_source(folder)
    family = find_family(model_config(source), preprocessor_config(source))
    return Model(folder, oracle, variant, load_tiny_encoder(folder), family, tiny_gemma)


def _inputs(model, pictures, text):
    """What transformers makes of a text and its pictures: arguments of its model."""
    processed = tiny_gemma.processor(model.variant)(
        text=text, images=pictures, return_tensors="pt", do_pan_and_scan=False
    )
    processed.pop("attention_mask")
    return dict(processed)


@torch.no_grad()
def _expected_embeddings(model, pictures):
    """[tokens of all pictures, hidden size]."""
    values = _inputs(model, pictures, "<start_of_image>" * len(pictures))["pixel_values"]
    return torch.cat(list(model.oracle.get_image_features(values).pooler_output)).numpy()


def _placed(model, pictures, text):
    """The prompt as the server makes it of a text."""

    async def load(references, modality, field):
        return model.family.prepare(pictures, modality)

    loader = SimpleNamespace(family=model.family, load=load)
    info = SimpleNamespace(vocab_size=256)
    context = SimpleNamespace(tokenizer=tiny_gemma.tokenizer(), capacity=10_000, family=model.family, info=info)
    names = tuple(map(str, range(len(pictures))))
    media = PromptMedia(names, (), picture_modality(len(pictures)), "image_data", "video_data")
    state = SimpleNamespace(context=context, media=loader)
    [prompt] = asyncio.run(tokenising.resolve(Texts([text], ["text"]), ["text"], state, [media]))
    return prompt


def _embedded(model, prompt):
    """The embeddings of a prompt's pictures, one after another."""
    encoded = [np.frombuffer(list(model.encoder.encode(item))[-1], np.float32) for item in prompt.media]
    return np.concatenate([rows.reshape(item.num_rows, -1) for item, rows in zip(prompt.media, encoded, strict=True)])


@torch.no_grad()
def _expected(model, inputs):
    """The tokens that follow, and the log-probabilities [new tokens, vocab] that they are drawn from."""
    tokens, rows, past = [], [], None
    for _ in range(NEW_TOKENS):
        output = model.oracle(**inputs, cache=past, use_cache=True)
        rows.append(torch.log_softmax(output.logits[0, -1], dim=-1).numpy())
        tokens.append(int(rows[-1].argmax()))
        inputs, past = {"input_ids": torch.tensor([tokens[-1:]])}, output.cache
    return tokens, rows


def _check_end_to_end(model, count, **changes):
    pictures, text = PICTURES[:count], TEXTS[count]
    inputs, prompt = _inputs(model, pictures, text), _placed(model, pictures, text)
    assert [tiny_gemma.IMAGE if token < 0 else token for token in prompt.token_ids] == inputs["input_ids"][0].tolist()
    ids = [NO_TOKEN if token < 0 else token for token in prompt.token_ids]
    whole = [(item.start, item.start + item.num_tokens) for item in prompt.media if item.is_whole]
    tokens, logprobs = generate(model, ids, _embedded(model, prompt), pictures=whole, **changes)
    expected_tokens, expected_rows = _expected(model, inputs)
    assert tokens == expected_tokens
    for token, found, row in zip(tokens, logprobs, expected_rows, strict=True):
        assert found == pytest.approx(row[token], abs=2e-4)


@pytest.mark.parametrize("size", [(28, 28), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_a_picture_equal_transformers(model, size):
    shown = picture(*size)
    [prepared] = model.family.prepare([shown], "image")
    check_embeddings(model.encoder, prepared, _expected_embeddings(model, [shown]))


@pytest.mark.parametrize("count", TEXTS)
def test_tokens_after_pictures_equal_transformers(model, count):
    _check_end_to_end(model, count)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_threads": 2},
        {"kernels": "torch"},
        {"kernels": "tree"},
        {"num_ranks": 2},
        {"num_ranks": 2, "pipeline_parallel_size": 2},
    ],
)
def test_tokens_are_the_same_in_chunks_that_end_after_a_picture(model, changes):
    _check_end_to_end(model, 2, chunk=5, beside=True, **changes)


def _is_used(kind):
    """Whether a kind of weights changes embeddings: the bias of keys adds the same to all scores of a query."""
    return kind.startswith(("vision_tower.", "multi_modal_projector.")) and not kind.endswith("k_proj.bias")


def test_noise_in_any_weight_of_the_part_that_sees_is_noticed(gemma3, tmp_path):
    [prepared] = gemma3.family.prepare(PICTURES[:1], "image")
    expected = _expected_embeddings(gemma3, PICTURES[:1])
    unnoticed, kinds = [], list(mutated.kinds(load_file(gemma3.folder / "model.safetensors")))
    for kind in mutated.folders_with_noise(gemma3.folder, tmp_path, _is_used):
        kinds.remove(kind)
        try:
            check_embeddings(load_tiny_encoder(tmp_path), prepared, expected)
        except AssertionError:
            continue
        unnoticed.append(kind)
    assert unnoticed == []
    kept = {kind for kind in kinds if not kind.startswith("language_model.")}
    assert kept == {"vision_tower.encoder.layers.*.self_attn.k_proj.bias"}


def test_pieces_and_pauses_do_not_change_the_numbers(gemma3, monkeypatch):
    prepared = [gemma3.family.prepare([shown], "image")[0] for shown in PICTURES[:2]]
    check_encoding_by_turns(gemma3.folder, prepared, monkeypatch, piece=30_000)
    check_small_pieces(gemma3, prepared[0], monkeypatch, "tower", "gemma3")


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
            "size: must make pictures as the tower takes them: 24 x",
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


def test_a_text_model_of_the_family_takes_no_pictures_and_needs_no_room_for_them(gemma3):
    config = model_config(folder_source(gemma3.folder))
    assert is_family(config)
    assert describe(config).whole_pictures == ("all", 9)
    del config["vision_config"]
    assert not is_family(config)
    assert describe(config).whole_pictures is None


def test_keys_that_a_config_leaves_out_have_the_values_of_the_published_ones():
    tower = {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
    assert parse_vision({"vision_config": tower}).num_tokens == 256
    family = find_family({"model_type": "gemma3", "vision_config": tower}, {"size": {"height": 896, "width": 896}})
    assert family.placeholder_id == 255999
    assert family.prepare([picture(9, 5)], "image")[0].pixels.shape == (1, 896, 896, 3)
