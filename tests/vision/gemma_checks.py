"""Gemma 3 and 4 that see against transformers: prompts, embeddings, log-probabilities and tokens."""

import asyncio
from functools import partial
from types import SimpleNamespace

import llava_checks
import pytest
import tiny_gemma
import torch
from idefics3_checks import embedded, expected
from llava_checks import generate
from tiny_llava import picture

from tureen.contract.types import NO_TOKEN
from tureen.requests import tokenising
from tureen.requests.media_fields import PromptMedia, picture_modality
from tureen.requests.prompts import Texts

TEXTS = {1: "Look:\n*\nwhat?", 2: "* and\n\n*is", 3: "a**\n\n*"}
"""Number of pictures -> a text with a star in place of each."""
PICTURES = [picture(57, 31), picture(40, 90, seed=3), picture(30, 30, seed=5)]
make_model = partial(llava_checks.make_model, tiny=tiny_gemma)


@torch.no_grad()
def expected_embeddings(model, pictures):
    """[tokens of all pictures, hidden size]."""
    names = ("pixel_values", "image_position_ids")
    values = dict(tiny_gemma.image_processor(model.variant)(pictures, return_tensors="pt"))
    features = model.oracle.get_image_features(**{name: values[name] for name in names if name in values})
    return torch.cat(list(features.pooler_output)).numpy()


def _placed(model, pictures, text):
    """The prompt as the server makes it of a text."""

    async def load(references, modality, field):
        return model.family.prepare(pictures, modality)

    loader = SimpleNamespace(family=model.family, load=load)
    info = SimpleNamespace(vocab_size=256)
    context = SimpleNamespace(
        tokenizer=tiny_gemma.tokenizer(model.variant), capacity=10_000, family=model.family, info=info
    )
    names = tuple(map(str, range(len(pictures))))
    media = PromptMedia(names, (), picture_modality(len(pictures)), "image_data", "video_data")
    state = SimpleNamespace(context=context, media=loader)
    [prompt] = asyncio.run(tokenising.resolve(Texts([text], ["text"]), ["text"], state, [media]))
    return prompt


def generated(model, count, **changes):
    """The tokens that follow a text with pictures, and their log-probabilities."""
    pictures, text = PICTURES[:count], TEXTS[count].replace("*", model.family.placeholder)
    prompt = _placed(model, pictures, text)
    ids = [NO_TOKEN if token < 0 else token for token in prompt.token_ids]
    whole = [(item.start, item.start + item.num_tokens) for item in prompt.media if item.is_whole]
    return prompt, generate(model, ids, embedded(model, prompt), pictures=whole, **changes)


def check_end_to_end(model, count, **changes):
    text = TEXTS[count].replace("*", model.family.placeholder)
    inputs = tiny_gemma.inputs(model.variant, text, PICTURES[:count])
    prompt, (tokens, logprobs) = generated(model, count, **changes)
    assert [tiny_gemma.IMAGE if token < 0 else token for token in prompt.token_ids] == inputs["input_ids"][0].tolist()
    expected_tokens, expected_rows = expected(model, inputs)
    assert tokens == expected_tokens
    for token, found, row in zip(tokens, logprobs, expected_rows, strict=True):
        assert found == pytest.approx(row[token], abs=2e-4)
