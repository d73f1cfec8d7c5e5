"""A body's prompts as text, token ids or embeddings: their form checked, texts tokenized."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tureen.contract.types import NO_TOKEN, MediaItem
from tureen.errors import InvalidRequest, echo
from tureen.requests.shared_fields import MAX_PROMPTS
from tureen.requests.state import Context

LARGEST = {"float16": 65504.0}
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Prompt(NamedTuple):
    """One prompt. With embeddings (float32 [tokens, hidden_size] as bytes) every token id is NO_TOKEN."""

    token_ids: list[int]
    embeds: bytes = b""
    media: tuple[MediaItem, ...] = ()


class Texts(NamedTuple):
    """Prompts that must be tokenized, and what to call each in an error."""

    texts: list[str]
    names: list[str]


def texts(given: str | list[str], field: str) -> Texts:
    """Raises InvalidRequest for an empty text."""
    is_batch = isinstance(given, list)
    found = Texts(given if isinstance(given, list) else [given], [])
    for index, text in enumerate(found.texts):
        name = f"{field}[{index}]" if is_batch else field
        found.names.append(name)
        if not text:
            raise InvalidRequest(f"{name} is empty; a prompt has at least one token", field=name, code="empty_prompt")
    return found


def texts_or_ids(
    given: Any, field: str, context: Context, *, most: int, may_be_cut: bool = False
) -> tuple[Texts | list[Prompt], list[str]]:
    """OpenAI's form: a text, token ids, or a list of texts or of lists of ids; and what to call each in an error.

    `most`: prompts; `may_be_cut`: they may be longer than the context. Raises InvalidRequest.
    """
    if isinstance(given, str):
        found = texts(given, field)
        return found, found.names
    if given and not isinstance(given[0], int):
        check_batch(len(given), most, field)
    kinds = set(map(type, given))
    if kinds == {str}:
        found = texts(given, field)
        return found, found.names
    if str in kinds:
        raise InvalidRequest(f"{field} mixes texts and token ids; send one or the other", field=field)
    ids = id_lists(given, context, may_be_empty=False, field=field, most=most, may_be_cut=may_be_cut)
    is_batch = isinstance(given[0], list)
    return ids, [f"{field}[{index}]" if is_batch else field for index in range(len(ids))]


def check_batch(count: int, most: int, field: str) -> None:
    """Raises InvalidRequest for more prompts than one body may have."""
    if count > most:
        raise InvalidRequest(f"{field} is a batch of at most {most} prompts, got {count}", field=field)


def id_lists(
    given: list[Any],
    context: Context,
    *,
    may_be_empty: bool,
    field: str = "input_ids",
    most: int = MAX_PROMPTS,
    may_be_cut: bool = False,
) -> list[Prompt]:
    """Token ids: one prompt, or a batch of at most so many; those that may not be cut fit the context.

    Raises InvalidRequest.
    """
    is_batch = bool(given) and isinstance(given[0], list)
    lists = given if is_batch else [given]
    check_batch(len(lists), most, field)
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


def too_long(num_prompt: int, prompt_name: str, context: Context) -> InvalidRequest:
    return InvalidRequest(
        f"The input ({num_prompt} tokens) is longer than the model's context length ({context.capacity} tokens); "
        "shorten it, or start the server with a larger --context-length or --max-total-tokens.",
        field=prompt_name,
        code="prompt_too_long",
    )


def _check_ids(ids: list[Any], where: str, vocab_size: int, placeholder_ids: frozenset[int]) -> None:
    """No line of this runs once for each id, of which there may be a million."""
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


def embeddings(given: list[Any], context: Context) -> list[Prompt]:
    """input_embeds: [tokens, hidden_size] numbers, or a batch of such. Raises InvalidRequest."""
    is_batch = bool(given) and (not given[0] or isinstance(given[0][0], list))
    matrices = given if is_batch else [given]
    check_batch(len(matrices), MAX_PROMPTS, "input_embeds")
    return [
        _embedding(matrix, f"input_embeds[{index}]" if is_batch else "input_embeds", context)
        for index, matrix in enumerate(matrices)
    ]


def _embedding(matrix: list[Any], where: str, context: Context) -> Prompt:
    width = context.info.hidden_size
    if not matrix:
        raise InvalidRequest(f"{where} is empty; a prompt has at least one token", field=where, code="empty_prompt")
    if len(matrix) > context.capacity:
        raise InvalidRequest(
            f"The input ({len(matrix)} embeddings in {where}) is longer than the model's context length "
            f"({context.capacity} tokens); shorten it.",
            field=where,
            code="prompt_too_long",
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


def _mixed(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field} mixes {what} and lists of them; send one or the other", field=field)
