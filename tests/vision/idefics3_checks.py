"""Idefics3 and SmolVLM against transformers: embeddings, prompts, log-probabilities and tokens."""

import asyncio
from functools import partial
from types import SimpleNamespace

import llava_checks
import numpy as np
import pytest
import tiny_idefics3
import torch
from llava_checks import NEW_TOKENS, generate
from tiny_llava import picture

from tureen.contract.types import NO_TOKEN, PICTURE
from tureen.requests.media_fields import MediaPlacer, PromptMedia, picture_modality
from tureen.requests.prompts import Prompt

TEXTS = {1: "Look:\n<image>\nwhat?", 2: "<image> and <image>\n\nis", 3: "a<image><image>\nb<image>"}
PICTURES = [picture(57, 31), picture(40, 90, seed=3), picture(30, 30, seed=5)]
make_model = partial(llava_checks.make_model, tiny=tiny_idefics3)


def _inputs(model, pictures, text):
    """What transformers makes of a text and its pictures: arguments of its model."""
    [prepared] = model.family.prepare(pictures[:1], "image")
    processor = tiny_idefics3.processor(model.variant, prepared.num_tokens // len(prepared.pixels))
    return dict(processor(text=text, images=pictures, return_tensors="pt"))


@torch.no_grad()
def expected_embeddings(model, pictures):
    """[tokens of all pictures, hidden size]."""
    values = dict(tiny_idefics3.image_processor(model.variant)([pictures], return_tensors="pt"))
    return torch.cat(model.oracle.get_image_features(**values).pooler_output).numpy()


def _placed(model, pictures, text):
    """The prompt as the server makes it."""

    async def load(references, modality, field):
        return model.family.prepare(pictures, modality)

    tokenizer = tiny_idefics3.tokenizer()
    marked = [PICTURE if token == tiny_idefics3.IMAGE else token for token in tokenizer.encode(text)]
    loader = SimpleNamespace(family=model.family, load=load)
    placer = MediaPlacer(loader, SimpleNamespace(tokenizer=tokenizer, capacity=10_000))
    names = tuple(map(str, range(len(pictures))))
    media = PromptMedia(names, (), picture_modality(len(pictures)), "image_data", "video_data")
    return asyncio.run(placer.place(Prompt(marked), media, "text"))


def embedded(model, prompt):
    """The embeddings of a prompt's pictures, one after another, each encoded once."""
    pictures = [item for item in prompt.media if not item.rows_before]
    assert sum(item.num_tokens for item in prompt.media) == sum(item.num_rows for item in pictures)
    encoded = [np.frombuffer(list(model.encoder.encode(item))[-1], np.float32) for item in pictures]
    return np.concatenate([rows.reshape(item.num_rows, -1) for item, rows in zip(pictures, encoded, strict=True)])


@torch.no_grad()
def expected(model, inputs):
    """The tokens that follow, and the log-probabilities [new tokens, vocab] that they are drawn from."""
    tokens, rows, past = [], [], None
    for _ in range(NEW_TOKENS):
        output = model.oracle(**inputs, cache=past, use_cache=True)
        rows.append(torch.log_softmax(output.logits[0, -1], dim=-1).numpy())
        tokens.append(int(rows[-1].argmax()))
        inputs, past = {"input_ids": torch.tensor([tokens[-1:]])}, output.cache
    return tokens, rows


def check_end_to_end(model, count, **changes):
    pictures, text = PICTURES[:count], TEXTS[count]
    inputs = _inputs(model, pictures, text)
    inputs.pop("attention_mask")
    prompt = _placed(model, pictures, text)
    ids = [NO_TOKEN if token < 0 else token for token in prompt.token_ids]
    image = tiny_idefics3.IMAGE
    assert [image if token == NO_TOKEN else token for token in ids] == inputs["input_ids"][0].tolist()
    tokens, logprobs = generate(model, ids, embedded(model, prompt), **changes)
    expected_tokens, expected_rows = expected(model, inputs)
    assert tokens == expected_tokens
    for token, found, row in zip(tokens, logprobs, expected_rows, strict=True):
        assert found == pytest.approx(row[token], abs=2e-4)
