"""Prompts as texts become token ids, with a mark wherever a picture or a video stands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tureen.contract.types import PICTURE, VIDEO
from tureen.errors import InvalidRequest, echo
from tureen.media.base import Family
from tureen.requests.media_fields import Filling, Wanted, check_count
from tureen.requests.offload import offload
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.state import Context, ServerState
from tureen.text.tokenizer import Tokenizer


async def resolve(
    found: Texts | list[Prompt], names: Sequence[str], state: ServerState, wanted: Sequence[Wanted] | None = None
) -> list[Prompt]:
    """The prompts with their texts tokenized and their pictures in place; `wanted`: None = there are none.

    Raises InvalidRequest, Forbidden.
    """
    context, family, loader = state.context, state.context.family, state.media
    if wanted is None:
        wanted = [Wanted((), (), "image", name, name) for name in names]
    if family is None or loader is None:
        for one in wanted:
            if one.pictures or one.videos:
                raise InvalidRequest(
                    f"{one.field}: the model {context.info.model_name} takes text only", field=one.field
                )
        if isinstance(found, Texts):
            return [Prompt(ids) for ids in await tokenize(found.texts, names, context)]
        return found
    marked = await _marked(found, names, wanted, family, context)
    filling = Filling(loader, context)
    return [await filling.fill(*one) for one in zip(marked, wanted, names, strict=True)]


async def _marked(
    found: Texts | list[Prompt], names: Sequence[str], wanted: Sequence[Wanted], family: Family, context: Context
) -> list[Prompt]:
    """The prompts' token ids, with PICTURE and VIDEO where the placeholders are, as many as were sent."""
    marks = {family.placeholder_id: PICTURE, family.video_placeholder_id: VIDEO}
    marks.pop(None, None)
    if not isinstance(found, Texts):
        marked = [one._replace(token_ids=await _with_marks(one.token_ids, marks)) for one in found]
        for prompt, one, name in zip(marked, wanted, names, strict=True):
            check_count(prompt.token_ids, one, name, family)
        return marked
    check_lengths(found.texts, names, context)
    if context.tokenizer.token_id(family.placeholder) in marks:
        encoded = await encode(found.texts, context.tokenizer)
        split = [await _with_marks(ids, marks) for ids in encoded]
        for ids, one, name in zip(split, wanted, names, strict=True):
            check_count(ids, one, name, family)
    else:
        split = [
            await _split_at_placeholders(*one, family, context) for one in zip(found.texts, names, wanted, strict=True)
        ]
    for ids, name in zip(split, names, strict=True):
        check_tokens(ids, name, context)
    return [Prompt(ids) for ids in split]


async def _with_marks(token_ids: list[int], marks: Mapping[int | None, int]) -> list[int]:
    """The same with marks in place of placeholders."""
    if marks.keys().isdisjoint(token_ids):
        return token_ids
    return await offload.run(len(token_ids), lambda: [marks.get(token, token) for token in token_ids])


async def _split_at_placeholders(text: str, name: str, wanted: Wanted, family: Family, context: Context) -> list[int]:
    """For a tokenizer that does not know the placeholders."""
    marks = {family.placeholder: PICTURE}
    if family.video_placeholder is not None:
        marks[family.video_placeholder] = VIDEO
    first, *rest = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    found, parts = [marks[part] for part in rest[::2]], rest[1::2]
    check_count(found, wanted, name, family)
    [token_ids] = await encode([first], context.tokenizer)
    for mark, ids in zip(found, await encode(parts, context.tokenizer, add_special_tokens=False), strict=True):
        token_ids += (mark, *ids)
    return token_ids


async def tokenize(texts: Sequence[str], names: Sequence[str], context: Context) -> list[list[int]]:
    """Token ids of each text, which has no pictures. Raises InvalidRequest, with the text's name."""
    check_lengths(texts, names, context)
    ids = await encode(texts, context.tokenizer)
    for text, one, name in zip(texts, ids, names, strict=True):
        has_mark = any(mark in text for mark in context.placeholders)
        if has_mark or not context.placeholder_ids.isdisjoint(one):
            raise InvalidRequest(
                f"{name} has a placeholder for a picture, but no picture came with it; leave it out, or send a picture "
                "for each in image_data, with text or input_ids",
                field=name,
                code="image_placeholder_mismatch",
            )
        check_tokens(one, name, context)
    return ids


def check_lengths(texts: Sequence[str], names: Sequence[str], context: Context) -> None:
    """Raises InvalidRequest for a text that cannot fit, however long its tokens are."""
    limit = context.capacity * context.tokenizer.max_token_chars
    for text, name in zip(texts, names, strict=True):
        if len(text) > limit:
            raise InvalidRequest(
                f"The input ({len(text)} characters) is longer than the model's context length ({context.capacity} "
                "tokens) can hold; shorten it.",
                field=name,
                code="prompt_too_long",
            )


async def encode(texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> list[list[int]]:
    """Token ids of each text."""

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await offload.run_each(sum(map(len, texts)), encoded, texts)


def check_tokens(token_ids: Sequence[int], name: str, context: Context) -> None:
    """Of a text. Raises InvalidRequest for none, and for one of the tokenizer's that the model does not have."""
    if not token_ids:
        raise InvalidRequest(f"{name} has no tokens; a prompt has at least one", field=name, code="empty_prompt")
    unknown = max(token_ids)
    if unknown >= context.info.vocab_size:
        text = context.tokenizer.token_text(unknown)
        raise InvalidRequest(
            f"{name} has {echo(text)}, token {unknown}, which the model with its {context.info.vocab_size} tokens does "
            "not know; leave it out",
            field=name,
            code="token_id_out_of_range",
        )
