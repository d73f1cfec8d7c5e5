"""Models that see: embeddings, logits and tokens equal those of transformers, end to end through our text model."""

import functools
import os

import msgspec
import mutated
import numpy as np
import pytest
import tiny_llava
import torch
from runner_driver import GREEDY, Running, folder_source
from safetensors.torch import load_file, save_file

from tureen.config import Config
from tureen.contract.runner import Batch
from tureen.contract.types import NO_TOKEN, LogprobSpec, MediaItem
from tureen.devices.base import resolve_device
from tureen.log import no_progress
from tureen.media.families import find_family
from tureen.registry import declared
from tureen.runner import loading
from tureen.runner.encoder import load_encoder
from tureen.runner.load import load_runner
from tureen.vision.names import local_name
from tureen.weights.source import model_config, preprocessor_config
from tureen.weights.stored import VISION

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
CLOSE = 2e-5
NEW_TOKENS = 7
MUTATED = ("llava-dinov2-gated", "next-vicuna", "onevision")
"""Variants with all architectures and towers."""
TEXT = (5, 17, 99), (7, 200), (41, 42, 43, 44)
"""Before, between and after pictures."""


class Model(msgspec.Struct):
    folder: object
    oracle: object
    variant: str
    encoder: object
    family: object


def _make_config(**changes):
    return Config(
        device=DEVICE, dtype="float32", page_size=4, max_total_tokens=2048, num_threads=1, context_length=512, **changes
    )


def load_tiny_encoder(folder, **changes):
    source = folder_source(folder)
    return load_encoder(source, model_config(source), _make_config(**changes), resolve_device(DEVICE, 2), no_progress)


def _make_model(folder, variant):
    oracle = tiny_llava.write(folder, variant)
    source = folder_source(folder)
    family = find_family(model_config(source), preprocessor_config(source))
    return Model(folder, oracle, variant, load_tiny_encoder(folder), family)


@pytest.fixture(scope="module", params=tiny_llava.VARIANTS)
def model(request, tmp_path_factory):
    return _make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def onevision(tmp_path_factory):
    return _make_model(tmp_path_factory.mktemp("ov"), "onevision")


def _item(prepared):
    pixels = prepared.pixels
    return MediaItem("", 0, prepared.num_tokens, pixels.tobytes(), pixels.shape, tuple(prepared.layout))


def _encode(encoder, prepared):
    """[num_tokens, hidden size]."""
    *pauses, last = encoder.encode(_item(prepared))
    assert pauses == [None] * len(pauses)
    return np.frombuffer(last, np.float32).reshape(prepared.num_tokens, -1)


def _pixels(model, pictures, modality):
    """What transformers makes of them: arguments of its model."""
    if modality == "video":
        frames = [np.asarray(picture.resize((28, 28), 3)) for picture in pictures]
        mean, std = (
            np.array(getattr(tiny_llava.processor(model.variant), name)) for name in ("image_mean", "image_std")
        )
        values = np.moveaxis((np.stack(frames) / 255 - mean) / std, -1, 1)
        return {"pixel_values_videos": torch.tensor(values[None], dtype=torch.float32)}
    is_nested = modality == "multi-images" and model.variant == "onevision"
    return dict(tiny_llava.processor(model.variant)([pictures] if is_nested else pictures, return_tensors="pt"))


@torch.no_grad()
def _expected_embeddings(model, pictures, modality):
    inputs = _pixels(model, pictures, modality)
    if modality == "video":
        return [model.oracle.model.get_video_features(**inputs).pooler_output[0].numpy()]
    return [one.numpy() for one in model.oracle.model.get_image_features(**inputs).pooler_output]


@torch.no_grad()
def _expected(model, prompt, pictures, modality):
    """The tokens that follow, and the log-probabilities [new tokens, vocab] that they are drawn from."""
    tokens, rows, given, past = [], [], list(prompt), None
    inputs = _pixels(model, pictures, modality)
    for _ in range(NEW_TOKENS):
        output = model.oracle(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True, **inputs)
        rows.append(torch.log_softmax(output.logits[0, -1], dim=-1).numpy())
        given, inputs, past = [int(rows[-1].argmax())], {}, output.past_key_values
        tokens += given
    return tokens, rows


def _prompt(counts, token_id):
    """Text with a picture of so many tokens after each piece of it but the last."""
    found = list(TEXT[0])
    for count, text in zip(counts, (*TEXT[1:], TEXT[0]), strict=False):
        found += [token_id] * count + list(text)
    return found


def _generate(model, prompt, embeddings, *, chunk=1 << 20, **changes):
    """The tokens that follow, and the drawn tokens' log-probabilities. prompt: NO_TOKEN where the embeddings stand."""
    runner = load_runner(folder_source(model.folder), _make_config(**changes))
    try:
        spec = LogprobSpec(prompt_start=-1, top=0)
        running = Running(0, prompt, range(200), params=GREEDY, logprobs=spec)
        while len(running.output) < NEW_TOKENS:
            row = running.next_row(chunk)
            first = running.token_ids[: row.start].count(NO_TOKEN)
            given = embeddings[first : first + row.token_ids.count(NO_TOKEN)]
            row = msgspec.structs.replace(row, embeds=given.tobytes())
            [output] = runner.run(Batch((row,), (running.state,) if running.is_new else ())).rows
            running.is_new = False
            running.take(row, output)
        return running.output, [one.token[0] for one in running.output_logprobs]
    finally:
        runner.close()


def check_end_to_end(model, pictures, modality, **changes):
    prepared = model.family.prepare(pictures, modality)
    is_video = modality == "video"
    placeholder = model.family.video_placeholder_id if is_video else model.family.placeholder_id
    counts = [one.num_tokens for one in prepared]
    embeddings = np.concatenate([_encode(model.encoder, one) for one in prepared])
    tokens, logprobs = _generate(model, _prompt(counts, NO_TOKEN), embeddings, **changes)
    expected_tokens, expected_rows = _expected(model, _prompt(counts, placeholder), pictures, modality)
    assert tokens == expected_tokens
    for token, found, row in zip(tokens, logprobs, expected_rows, strict=True):
        assert found == pytest.approx(row[token], abs=2e-4)


def check_embeddings(encoder, prepared, expected):
    found = _encode(encoder, prepared)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < CLOSE * max(1, np.abs(expected).max())


@pytest.mark.parametrize("size", [(28, 28), (57, 31), (31, 120), (3, 2), (300, 20)])
def test_embeddings_of_a_picture_equal_transformers(model, size):
    picture = tiny_llava.picture(*size)
    [prepared] = model.family.prepare([picture], "image")
    [expected] = _expected_embeddings(model, [picture], "image")
    check_embeddings(model.encoder, prepared, expected)


def _is_used(kind):
    """Whether a kind of weights changes embeddings: the bias of keys adds the same to all scores of a query."""
    is_of_keys = kind.endswith(("k_proj.bias", "key.bias"))
    return kind.startswith(VISION) and not is_of_keys and local_name(kind.replace("*", "0"), 1) is not None


@pytest.mark.parametrize("model", MUTATED, indirect=True)
def test_noise_in_any_weight_of_the_part_that_sees_is_noticed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "find_text_model", functools.cache(loading.find_text_model))  # parses all models
    picture = tiny_llava.picture(28, 28)
    [prepared] = model.family.prepare([picture], "image")
    [expected] = _expected_embeddings(model, [picture], "image")
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
    with_pictures = {name for name in known if name.endswith("ForConditionalGeneration")}
    assert families == with_pictures - {"Gemma3ForConditionalGeneration"}  # of which the text model alone is served
    assert {tiny_llava.VARIANTS[variant][1] for variant in MUTATED} == {one[1] for one in tiny_llava.VARIANTS.values()}


def test_tokens_after_one_picture_equal_transformers(model):
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image")


def test_tokens_after_several_pictures_equal_transformers(model):
    pictures = [tiny_llava.picture(57, 31), tiny_llava.picture(40, 90, seed=3)]
    check_end_to_end(model, pictures, "multi-images")


def test_tokens_after_a_video_equal_transformers(onevision):
    frames = [tiny_llava.picture(50, 40, seed) for seed in range(3)]
    [prepared] = onevision.family.prepare(frames, "video")
    [expected] = _expected_embeddings(onevision, frames, "video")
    assert np.abs(_encode(onevision.encoder, prepared) - expected).max() < CLOSE * np.abs(expected).max()
    check_end_to_end(onevision, frames, "video")


def test_tokens_are_the_same_with_torch_and_in_chunks_that_cut_a_picture(onevision):
    pictures = [tiny_llava.picture(113, 112)]
    check_end_to_end(onevision, pictures, "image", kernels="torch")
    check_end_to_end(onevision, pictures, "image", kernels="torch", chunk=5)


def test_a_large_picture_is_reduced_to_the_features_that_the_config_allows(onevision):
    picture = tiny_llava.picture(1000, 1000)
    [prepared] = onevision.family.prepare([picture], "image")
    assert len(prepared.pixels) == 1 + 16
    assert prepared.num_tokens < 16 * (1 + 3) + 8
    [expected] = _expected_embeddings(onevision, [picture], "image")
    assert np.abs(_encode(onevision.encoder, prepared) - expected).max() < CLOSE * np.abs(expected).max()


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
    model = _make_model(tmp_path, variant)
    _renamed(tmp_path, rename)
    model.encoder = load_tiny_encoder(tmp_path)
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image", kernels="torch")


def test_a_16_bit_checkpoint_is_computed_in_float32(tmp_path):
    model = _make_model(tmp_path, "llava-clip")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    model.oracle.bfloat16().float()
    model.encoder = load_tiny_encoder(tmp_path)
    picture = tiny_llava.picture(57, 31)
    [prepared] = model.family.prepare([picture], "image")
    [expected] = _expected_embeddings(model, [picture], "image")
    assert np.abs(_encode(model.encoder, prepared) - expected).max() < CLOSE * np.abs(expected).max()


def test_pictures_that_are_encoded_by_turns_get_the_numbers_of_each_alone(onevision, monkeypatch):
    monkeypatch.setattr("tureen.runner.encoder.CPU_PIECE", 50_000)
    encoder = load_tiny_encoder(onevision.folder)
    prepared = [onevision.family.prepare([tiny_llava.picture(*size)], "image")[0] for size in ((57, 31), (113, 112))]
    alone = [list(encoder.encode(_item(one))) for one in prepared]
    assert min(map(len, alone)) > 10
    turns, found = [encoder.encode(_item(one)) for one in prepared], [None, None]
    while None in found:
        for index, turn in enumerate(turns):
            found[index] = found[index] or next(turn)
            torch.randn(40, 40) @ torch.randn(40, 40)
    assert found == [one[-1] for one in alone]


def test_small_pieces_give_nearly_the_same_numbers(onevision, monkeypatch):
    [prepared] = onevision.family.prepare([tiny_llava.picture(113, 112)], "image")
    whole = _encode(onevision.encoder, prepared)
    monkeypatch.setattr("tureen.vision.tower.MIN_ROWS", 3)
    monkeypatch.setattr("tureen.runner.encoder.CPU_PIECE", 1)
    pieces = _encode(load_tiny_encoder(onevision.folder), prepared)
    assert np.abs(pieces - whole).max() < CLOSE * np.abs(whole).max()


def test_random_weights_load_without_a_checkpoint(onevision):
    (onevision.folder / "empty").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (onevision.folder / "empty" / name).write_bytes((onevision.folder / name).read_bytes())
    [prepared] = onevision.family.prepare([tiny_llava.picture(57, 31)], "image")
    embed = functools.partial(_encode, prepared=prepared)
    found = [embed(load_tiny_encoder(onevision.folder / "empty", load_format="dummy")) for _ in range(2)]
    assert np.isfinite(found[0]).all()
    assert np.array_equal(*found)
