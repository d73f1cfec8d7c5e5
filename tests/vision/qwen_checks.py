"""Qwens that see against transformers: embeddings, log-probabilities and tokens, by position and picture."""

from functools import partial

import llava_checks
import numpy as np
import pytest
import tiny_llava
import tiny_qwen_vl
import torch
from llava_checks import NEW_TOKENS, encode, generate
from runner_driver import GREEDY
from tiny_qwen_vl import IMAGE

from tureen.contract.types import NO_TOKEN, GenerateRequest, MediaItem
from tureen.engine.embedded import Embedded
from tureen.media.base import Prepared

TEXT = (5, 17, 99), (7, 200), (41, 42, 43, 44)
"""Before, between and after pictures."""
PREPARED = Prepared(np.zeros((1, 8, 8, 3), np.uint8), 1)
PICTURES = [tiny_llava.picture(57, 31), tiny_llava.picture(20, 41, seed=3)]
make_model = partial(llava_checks.make_model, tiny=tiny_qwen_vl)


@torch.no_grad()
def expected_embeddings(model, picture):
    inputs = tiny_qwen_vl.processor()([picture], return_tensors="pt")
    output = model.oracle.model.get_image_features(**inputs)
    [features], deep = output.pooler_output, getattr(output, "deepstack_features", None) or []
    return torch.cat([features, *(one for [one] in deep)], dim=-1).numpy()


def _prompt(counts, token_id):
    found = list(TEXT[0])
    for count, text in zip(counts, (*TEXT[1:], TEXT[0]), strict=False):
        found += [token_id] * count + list(text)
    return found


@torch.no_grad()
def _expected(model, prompt, pictures):
    """The tokens that follow, and the log-probabilities [new tokens, vocab] that they are drawn from."""
    token_ids, rows = list(prompt), []
    inputs = tiny_qwen_vl.processor()(pictures, return_tensors="pt") if pictures else {}
    for _ in range(NEW_TOKENS):
        given = torch.tensor([token_ids])
        kinds = (given == IMAGE).int() * (torch.arange(len(token_ids)) < len(prompt))
        output = model.oracle(input_ids=given, mm_token_type_ids=kinds, use_cache=False, **inputs)
        rows.append(torch.log_softmax(output.logits[0, -1], dim=-1).numpy())
        token_ids.append(int(rows[-1].argmax()))
    return token_ids[len(prompt) :], rows


def _request(model, prepared):
    """The prompt as the engine gets it."""
    media, start = [], len(TEXT[0])
    for one, text in zip(prepared, (*TEXT[1:], TEXT[0]), strict=False):
        [part] = model.family.parts(one)
        media.append(MediaItem("", start, part.num_tokens, b"", one.pixels.shape, grid=part.grid))
        start += part.num_tokens + len(text)
    token_ids = _prompt([one.num_tokens for one in prepared], NO_TOKEN)
    return GenerateRequest(
        id="r", token_ids=tuple(token_ids), params=GREEDY, max_new_tokens=NEW_TOKENS, seed=0, media=tuple(media)
    )


def _generate(model, pictures, **options):
    """The tokens that follow, and the drawn tokens' log-probabilities."""
    prepared = model.family.prepare(pictures, "multi-images")
    embeddings = np.concatenate([encode(model.encoder, one) for one in prepared or [PREPARED]])
    request = _request(model, prepared)
    return generate(model, request.token_ids, embeddings, places=Embedded(request).places, **options)


def check_end_to_end(model, pictures, **options):
    counts = [one.num_tokens for one in model.family.prepare(pictures, "multi-images")]
    expected_tokens, expected_rows = _expected(model, _prompt(counts, IMAGE), pictures)
    tokens, logprobs = _generate(model, pictures, **options)
    assert tokens == expected_tokens
    for token, found, row in zip(tokens, logprobs, expected_rows, strict=True):
        assert found == pytest.approx(row[token], abs=2e-4)
