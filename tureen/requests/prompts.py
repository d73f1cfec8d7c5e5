"""Checks the form of a body's prompts, which are texts, token ids or embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tureen.contract.types import NO_TOKEN, MediaItem
from tureen.errors import ContextExceeded, InvalidRequest, echo
from tureen.requests.planning import check_batch
from tureen.requests.state import Context

LARGEST = {"float16": 65504.0}
"""Largest finite number of a model's dtype, if it is less than float32's."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Prompt(NamedTuple):
    """A prompt of token ids. `embeds`: float32 [tokens, hidden_size] as bytes; then every token id is NO_TOKEN."""

    token_ids: list[int]
    embeds: bytes = b""
    media: tuple[MediaItem, ...] = ()
    second_start: int = 0  # of a pair of texts, as in GenerateRequest


class Texts(NamedTuple):
    """Prompts that are not tokenized yet, and their names in errors."""

    texts: list[str]
    names: list[str]


def shown_ids(ids: Sequence[int], context: Context) -> list[int]:
    """Returns the ids of a prompt's tokens as answers show them. A picture's tokens have the id of its placeholder, or
    the id that the model has for its embeddings."""
    if not ids or min(ids) > NO_TOKEN:
        return list(ids)
    placeholder = next(iter(sorted(context.placeholder_ids)), NO_TOKEN)
    if context.family is not None and context.family.inner_id is not None:
        placeholder = context.family.inner_id
    return [placeholder if token_id <= NO_TOKEN else token_id for token_id in ids]


def texts(value: str | list[str], field: str) -> Texts:
    """Names each prompt of a text or a list of texts. Raises InvalidRequest for an empty text."""
    is_batch = isinstance(value, list)
    prompts = Texts(value if isinstance(value, list) else [value], [])
    for index, text in enumerate(prompts.texts):
        name = f"{field}[{index}]" if is_batch else field
        prompts.names.append(name)
        if not text:
            raise InvalidRequest(f"{name} is empty; a prompt has at least one token", field=name, code="empty_prompt")
    return prompts


def texts_or_ids(
    value: Any, field: str, context: Context, *, max_prompts: int | None = None, may_be_cut: bool = False
) -> tuple[Texts | list[Prompt], list[str]]:
    """Reads prompts in OpenAI's form: a text, token ids, or a list of texts or of lists of ids. Returns them with what
    errors call each.

    `max_prompts`: prompts allowed, None = --max-batch-size; `may_be_cut`: prompts may be longer than the context.
    Raises InvalidRequest.
    """
    if isinstance(value, str):
        prompts = texts(value, field)
        return prompts, prompts.names
    if value and not isinstance(value[0], int):
        check_batch(len(value), field, context, max_prompts)
    kinds = set(map(type, value))
    if kinds == {str}:
        prompts = texts(value, field)
        return prompts, prompts.names
    if str in kinds:
        raise InvalidRequest(f"{field} mixes texts and token ids; send one or the other", field=field)
    ids = id_lists(value, context, may_be_empty=False, field=field, max_prompts=max_prompts, may_be_cut=may_be_cut)
    is_batch = isinstance(value[0], list)
    return ids, [f"{field}[{index}]" if is_batch else field for index in range(len(ids))]


def id_lists(
    value: list[Any],
    context: Context,
    *,
    may_be_empty: bool,
    field: str = "input_ids",
    max_prompts: int | None = None,
    may_be_cut: bool = False,
) -> list[Prompt]:
    """Reads prompts as token ids: one list, or a batch of at most `max_prompts` lists, None = --max-batch-size.

    `may_be_cut`: prompts may be longer than the context. Raises InvalidRequest.
    """
    is_batch = bool(value) and isinstance(value[0], list)
    lists = value if is_batch else [value]
    check_batch(len(lists), field, context, max_prompts)
    for index, ids in enumerate(lists):
        where = f"{field}[{index}]" if is_batch else field
        if not isinstance(ids, list):
            raise _mixed(field, "token ids")
        if not ids and not may_be_empty:
            raise InvalidRequest(f"{where} is empty; a prompt has at least one token", field=where, code="empty_prompt")
        if len(ids) > context.capacity and not may_be_cut:
            raise too_long(len(ids), where, context)
        _check_ids(ids, where, context.info.vocab_size, context.placeholder_ids)
    return [Prompt(ids) for ids in lists]


def last_tokens(prompt: Prompt, most: int | None, field: str) -> Prompt:
    """Returns the last `most` tokens of a prompt; None = all. Raises InvalidRequest naming `field`, which has the
    limit, if a prompt with pictures would be cut."""
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    if prompt.media:
        raise InvalidRequest(f"{field}: a prompt with pictures cannot be truncated; leave it out", field=field)
    return prompt._replace(token_ids=prompt.token_ids[-most:])


def too_long(num_prompt: int, prompt_name: str, context: Context) -> ContextExceeded:
    """Returns the error for a prompt of `num_prompt` tokens that exceeds the context."""
    return ContextExceeded(
        f"The input ({num_prompt} tokens) is longer than the model's context length ({context.capacity} tokens); "
        "shorten it, or start the server with a larger --context-length or --max-total-tokens.",
        field=prompt_name,
        num_tokens=num_prompt,
        capacity=context.capacity,
    )


def _check_ids(ids: list[Any], where: str, vocab_size: int, placeholder_ids: frozenset[int]) -> None:
    """Raises InvalidRequest for ids outside the vocabulary. Has no loop in Python, because there may be a million
    ids."""
    if set(map(type, ids)) - {int}:
        raise _mixed(where.split("[")[0], "token ids")
    known = set(ids) - placeholder_ids
    if not known or (min(known) >= 0 and max(known) < vocab_size):
        return
    wrong = min(known) if min(known) < 0 else max(known)
    raise InvalidRequest(
        f"{where}[{ids.index(wrong)}] must be a token id in [0, {vocab_size}), got {echo(wrong)}",
        field=where,
        code="token_id_out_of_range",
    )


def embeddings(value: list[Any], context: Context) -> list[Prompt]:
    """Reads SGLang's field input_embeds: [tokens, hidden_size] numbers, or a batch of such. Raises InvalidRequest."""
    is_batch = bool(value) and (not value[0] or isinstance(value[0][0], list))
    matrices = value if is_batch else [value]
    check_batch(len(matrices), "input_embeds", context)
    return [
        _embedding(matrix, f"input_embeds[{index}]" if is_batch else "input_embeds", context)
        for index, matrix in enumerate(matrices)
    ]


def _embedding(matrix: list[Any], where: str, context: Context) -> Prompt:
    width = context.info.hidden_size
    if not matrix:
        raise InvalidRequest(f"{where} is empty; a prompt has at least one token", field=where, code="empty_prompt")
    if len(matrix) > context.capacity:
        raise ContextExceeded(
            f"The input ({len(matrix)} embeddings in {where}) is longer than the model's context length "
            f"({context.capacity} tokens); shorten it.",
            field=where,
            num_tokens=len(matrix),
            capacity=context.capacity,
        )
    for position, row in enumerate(matrix):
        if not isinstance(row, list):
            raise _mixed("input_embeds", "embeddings")
        if len(row) != width:
            raise _bad_embeds(f"{where}[{position}] must have {width} numbers (the hidden size), got {len(row)}", where)
        if list in set(map(type, row)):
            raise _mixed("input_embeds", "embeddings")
    values = np.array(matrix, dtype=np.float64)
    largest = LARGEST.get(context.info.dtype, FLOAT32_MAX)
    if not (np.abs(values) <= largest).all():
        position = int(np.argwhere(~(np.abs(values) <= largest))[0][0])
        raise _bad_embeds(
            f"{where}[{position}] has a number that is not finite in the model's {context.info.dtype}", where
        )
    return Prompt([NO_TOKEN] * len(matrix), values.astype(np.float32).tobytes())


def _bad_embeds(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(message, field=field, code="invalid_input_embeds")


def _mixed(field: str, elements: str) -> InvalidRequest:
    return InvalidRequest(f"{field} mixes {elements} and lists of them; send one or the other", field=field)
