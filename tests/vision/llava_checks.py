"""Models that see against transformers: embeddings, logits and tokens, end to end through our text model."""

import os
from contextlib import closing, contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import tiny_llava
import torch
from rank_threads import ranks_in_threads
from runner_driver import Running, folder_source

from tureen.config import Config
from tureen.contract.runner import Batch
from tureen.contract.types import NO_TOKEN, LogprobSpec, MediaItem
from tureen.devices.base import resolve_device
from tureen.kernels.cpu import native
from tureen.log import no_progress
from tureen.media.families import find_family
from tureen.runner.encoder import load_encoder
from tureen.runner.load import load_runner
from tureen.weights.source import model_config, preprocessor_config

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
KERNELS = ("auto", "torch") if DEVICE == "cpu" else ("auto",)
CLOSE = 2e-5
NARROW = 2e-3
"""Largest share of an embedding by which matrices of 16 bits may change it."""
NEW_TOKENS = 7
TEXT = (5, 17, 99), (7, 200), (41, 42, 43, 44)
"""Before, between and after pictures."""


class Model(msgspec.Struct):
    folder: object
    oracle: object
    variant: str
    encoder: object
    family: object
    tiny: object = tiny_llava  # module that writes the variants: write, processor
    text_ids: dict = {}  # text of a picture's parts -> tokens


def _make_config(**changes):
    settings = {"page_size": 4, "max_total_tokens": 2048, "num_threads": 1, "context_length": 512, **changes}
    return Config(device=DEVICE, **{"dtype": "float32"} | settings)


class Encoders(NamedTuple):
    """The encoder of a model on each of its arrays: those of native kernels come first on a CPU, then torch's."""

    each: list
    narrow: object = None  # with matrices of 16 bits, as a CPU has them by default

    def encode(self, item):
        return self.each[0].encode(item)


def load_tiny_encoder(folder, each=KERNELS, **changes):
    source = folder_source(folder)
    configs = [_make_config(kernels=kernels, **changes) for kernels in each]
    device = resolve_device(DEVICE, 2)
    if DEVICE == "cpu":
        configs.append(_make_config(dtype="auto", **changes))
    loaded = [load_encoder(source, model_config(source), one, device, no_progress) for one in configs]
    return Encoders(loaded[: len(each)], *loaded[len(each) :])


def make_model(folder, variant, tiny=tiny_llava):
    oracle = tiny.write(folder, variant)
    source = folder_source(folder)
    family = find_family(model_config(source), preprocessor_config(source))
    return Model(folder, oracle, variant, load_tiny_encoder(folder), family, tiny, getattr(tiny, "TEXT_IDS", {}))


def item_of(prepared):
    pixels = prepared.pixels
    return MediaItem("", 0, prepared.num_tokens, pixels.tobytes(), pixels.shape, tuple(prepared.layout))


def encode(encoder, prepared):
    """[num_tokens, hidden size]."""
    *pauses, last = encoder.encode(item_of(prepared))
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
    return dict(model.tiny.processor(model.variant)([pictures] if is_nested else pictures, return_tensors="pt"))


@torch.no_grad()
def expected_embeddings(model, pictures, modality):
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


def shown(model, prepared, token_id):
    """What a picture becomes in the prompt; token_id: in place of its embeddings."""
    found = []
    for part in model.family.parts(prepared):
        found += [*model.text_ids.get(part.text, ()), *[token_id] * part.num_tokens]
    return found


def _prompt(pictures):
    """Text with a picture after each piece of it but the last. pictures: their tokens."""
    found = list(TEXT[0])
    for tokens, text in zip(pictures, (*TEXT[1:], TEXT[0]), strict=False):
        found += [*tokens, *text]
    return found


def _next_row(running, chunk, pictures):
    """The next chunk of tokens, longer where it would divide one of the pictures."""
    end = running.num_computed + chunk
    end = max([end, *(last for first, last in pictures if first < end < last)])
    row = running.next_row(end - running.num_computed)
    own = tuple((first, last) for first, last in pictures if first < end and running.num_computed < last)
    return msgspec.structs.replace(row, pictures=own)


@contextmanager
def _opened(model, num_ranks=1, **changes):
    """A runner of the model."""
    if num_ranks > 1:
        with ranks_in_threads(model.folder, num_ranks, dtype="float32", **changes) as runner:
            yield runner
        return
    with closing(load_runner(folder_source(model.folder), _make_config(**changes))) as runner:
        yield runner


def generate(
    model,
    prompt,
    embeddings,
    *,
    chunk=1 << 20,
    pictures=(),
    places=None,
    beside=False,
    again_from=None,
    adapter=None,
    **changes,
):
    """The tokens that follow, and the drawn tokens' log-probabilities.

    prompt: NO_TOKEN in place of embeddings; pictures: the bounds of those that layers see whole; places: from bounds to
    the places of these tokens; beside: with a text in the same steps, some of which a client gives as embeddings;
    again_from: a position from which the prompt is computed a second time, what is before it being in the cache;
    adapter: the folder of one that the prompt uses, not the text in the same steps.
    """
    running = Running(1, prompt, range(10, 200), logprobs=LogprobSpec(prompt_start=-1, top=0))
    other, own = Running(0, (9, NO_TOKEN, 7), range(10)), np.linspace(-1, 1, 64, dtype=np.float32).tobytes()
    with _opened(model, **changes) as runner:
        if adapter is not None:
            runner.call("load_adapter", number=1, path=str(adapter))
        while len(running.output) < NEW_TOKENS:
            row = _next_row(running, chunk, pictures)
            end = row.start + len(row.token_ids)
            first, last = (running.token_ids[:place].count(NO_TOKEN) for place in (row.start, end))
            at = b"" if places is None else places(row.start, end)
            embeds, number = embeddings[first:last].tobytes(), int(adapter is not None)
            rows = [(running, msgspec.structs.replace(row, embeds=embeds, places=at, adapter=number))]
            if beside:
                row = other.next_row(chunk)
                rows.insert(0, (other, msgspec.structs.replace(row, embeds=own if NO_TOKEN in row.token_ids else b"")))
            new = tuple(one.state for one, _ in rows if one.is_new)
            outputs = runner.run(Batch(tuple(row for _, row in rows), new)).rows
            for (one, taken), output in zip(rows, outputs, strict=True):
                one.is_new = False
                one.take(taken, output)
            if again_from is not None and running.output:
                running.token_ids, running.output_logprobs = list(prompt), []
                running.num_computed, again_from = again_from, None
    return running.output, [one.token[0] for one in running.output_logprobs]


def expected_answer(model, pictures, modality):
    """What `_expected` returns after a prompt with these pictures."""
    is_video = modality == "video"
    placeholder = model.family.video_placeholder_id if is_video else model.family.placeholder_id
    prepared = model.family.prepare(pictures, modality)
    return _expected(model, _prompt([shown(model, one, placeholder) for one in prepared]), pictures, modality)


def check_end_to_end(model, pictures, modality, **changes):
    check_answer(model, pictures, modality, expected_answer(model, pictures, modality), **changes)


def check_answer(model, pictures, modality, expected, **changes):
    prepared = model.family.prepare(pictures, modality)
    embeddings = np.concatenate([encode(model.encoder, one) for one in prepared])
    given = _prompt([shown(model, one, NO_TOKEN) for one in prepared])
    tokens, logprobs = generate(model, given, embeddings, **changes)
    expected_tokens, expected_rows = expected
    assert tokens == expected_tokens
    for token, found, row in zip(tokens, logprobs, expected_rows, strict=True):
        assert found == pytest.approx(row[token], abs=2e-4)


def check_embeddings(encoder, prepared, expected):
    for one in encoder.each:
        found = encode(one, prepared)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < CLOSE * max(1, np.abs(expected).max())
    if encoder.narrow is not None:
        assert encoder.narrow.arithmetic()["dtype"] == native.matrix_dtype("auto")
        assert np.linalg.norm(encode(encoder.narrow, prepared) - expected) < NARROW * np.linalg.norm(expected)


def check_encoding_by_turns(folder, prepared, monkeypatch, *, piece=50_000):
    """Pictures that are encoded by turns, with other work between, get the numbers of each alone."""
    monkeypatch.setattr("tureen.runner.encoder.CPU_PIECE", piece)
    for encoder in load_tiny_encoder(folder).each:
        alone = [list(encoder.encode(item_of(one))) for one in prepared]
        assert min(map(len, alone)) > 10
        turns, found = [encoder.encode(item_of(one)) for one in prepared], [None] * len(prepared)
        while None in found:
            for index, turn in enumerate(turns):
                found[index] = found[index] or next(turn)
                torch.randn(40, 40) @ torch.randn(40, 40)
        assert found == [one[-1] for one in alone]


def check_small_pieces(model, prepared, monkeypatch, *modules):
    """The smallest pieces give nearly the same numbers. modules: files of tureen.vision that divide products."""
    whole = encode(model.encoder, prepared)
    for module in modules:
        monkeypatch.setattr(f"tureen.vision.{module}.MIN_ROWS", 3)
    monkeypatch.setattr("tureen.runner.encoder.CPU_PIECE", 1)
    check_embeddings(load_tiny_encoder(model.folder), prepared, whole)
