"""Tokenizes prompts, and marks the positions of their pictures and videos."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from tureen.contract.types import PICTURE, VIDEO
from tureen.errors import ContextExceeded, InvalidRequest, echo
from tureen.media.base import Family
from tureen.media.families import why_blind
from tureen.requests.media_fields import MediaPlacer, PromptMedia, check_count
from tureen.requests.offload import offload
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.state import Context, ServerState
from tureen.text.tokenizer import Tokenizer

SPARE = 16
"""Number of tokens before a cut in a text that the cut may change."""

MAX_BYTES = 4
"""Most bytes, and so tokens, of a character."""

MOST_COMPARED = 1 << 16
"""Characters of two texts that are read to find out which one has more tokens."""


async def resolve(
    inputs: Texts | list[Prompt], names: Sequence[str], state: ServerState, media: Sequence[PromptMedia] | None = None
) -> list[Prompt]:
    """Returns the prompts with texts tokenized and pictures and videos loaded and put in their places.

    `names`: what errors call each prompt; `media`: of each prompt, None = no prompt has any. Raises InvalidRequest,
    Forbidden.
    """
    context, family, loader = state.context, state.context.family, state.media
    if media is None:
        media = [PromptMedia((), (), "image", name, name) for name in names]
    for item in media:
        check_takes(item, state)
    if family is None or loader is None:
        if isinstance(inputs, Texts):
            return [Prompt(ids) for ids in await tokenize(inputs.texts, names, context)]
        return inputs
    marked = await _marked(inputs, names, media, family, context)
    placer = MediaPlacer(loader, context)
    return [await placer.place(*fields) for fields in zip(marked, media, names, strict=True)]


def check_takes(item: PromptMedia, state: ServerState) -> None:
    """Raises InvalidRequest for pictures or videos if the model accepts only text here."""
    context = state.context
    if (item.pictures or item.videos) and (context.family is None or state.media is None):
        raise InvalidRequest(
            f"{item.field}: {context.info.model_name} takes only text on this server{_why_blind(context)}",
            field=item.field,
        )


def _why_blind(context: Context) -> str:
    """Returns why the model takes no pictures, for the end of a message; "" if it is a text model."""
    if context.config.language_model_only:
        return " (--language-model-only)"
    is_gguf = any(name.endswith(".gguf") for name, _, _ in context.info.files)
    if is_gguf and context.config.mmproj is None and why_blind() is None:
        return "; a GGUF model takes pictures only with the mmproj file that was made for it (--mmproj FILE)"
    return ""


async def _marked(
    inputs: Texts | list[Prompt], names: Sequence[str], media: Sequence[PromptMedia], family: Family, context: Context
) -> list[Prompt]:
    """Returns the prompts with PICTURE and VIDEO in place of placeholders. Raises InvalidRequest unless there are as
    many as pictures and videos were sent."""
    marks = {family.placeholder_id: PICTURE, family.video_placeholder_id: VIDEO}
    marks.pop(None, None)
    if not isinstance(inputs, Texts):
        marked = [prompt._replace(token_ids=await _with_marks(prompt.token_ids, marks)) for prompt in inputs]
        for prompt, item, name in zip(marked, media, names, strict=True):
            check_count(prompt.token_ids, item, name, family)
        return marked
    texts = [spaced(text, family) for text in inputs.texts]
    check_lengths(texts, names, context)
    if context.tokenizer.token_id(family.placeholder) in marks:
        encoded = await encode(texts, context.tokenizer)
        split = [await _with_marks(ids, marks) for ids in encoded]
        for ids, item, name in zip(split, media, names, strict=True):
            check_count(ids, item, name, family)
    else:
        split = [
            await _split_at_placeholders(text, name, item, family, context)
            for text, name, item in zip(texts, names, media, strict=True)
        ]
    for ids, name in zip(split, names, strict=True):
        check_tokens(ids, name, context)
    return [Prompt(ids) for ids in split]


def spaced(text: str, family: Family, placeholder: str | None = None) -> str:
    """Returns a prompt with the text that the model expects around placeholders, which some tokenizers join with the
    neighbouring text. placeholder: its spelling in this text."""
    placeholder = placeholder or family.placeholder
    return text.replace(placeholder, family.around + placeholder + family.around) if family.around else text


async def _with_marks(token_ids: list[int], marks: Mapping[int | None, int]) -> list[int]:
    """Returns the token ids with placeholder ids replaced by `marks`."""
    if marks.keys().isdisjoint(token_ids):
        return token_ids
    return await offload.run(len(token_ids), lambda: [marks.get(token, token) for token in token_ids])


async def _split_at_placeholders(
    text: str, name: str, media: PromptMedia, family: Family, context: Context
) -> list[int]:
    """Tokenizes a text around its placeholders, which are not tokens of the tokenizer, and inserts marks for them."""
    marks = {family.placeholder: PICTURE}
    if family.video_placeholder is not None:
        marks[family.video_placeholder] = VIDEO
    first, *rest = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    placeholders, parts = [marks[part] for part in rest[::2]], rest[1::2]
    check_count(placeholders, media, name, family)
    [token_ids] = await encode([first], context.tokenizer)
    for mark, ids in zip(placeholders, await encode(parts, context.tokenizer, add_special_tokens=False), strict=True):
        token_ids += (mark, *ids)
    return token_ids


async def tokenize(texts: Sequence[str], names: Sequence[str], context: Context) -> list[list[int]]:
    """Returns the token ids of each text. Raises InvalidRequest, with the text's name, for a text that is too long
    or has placeholders: no picture comes with it."""
    check_lengths(texts, names, context)
    ids = await encode(texts, context.tokenizer)
    for text, token_ids, name in zip(texts, ids, names, strict=True):
        has_mark = any(mark in text for mark in context.placeholders)
        if has_mark or not context.placeholder_ids.isdisjoint(token_ids):
            raise InvalidRequest(
                f"{name} has a placeholder for a picture, but no picture was sent; leave it out, or send a picture "
                "for each in image_data, with text or input_ids",
                field=name,
                code="image_placeholder_mismatch",
            )
        check_tokens(token_ids, name, context)
    return ids


def check_lengths(texts: Sequence[str], names: Sequence[str], context: Context) -> None:
    """Raises InvalidRequest for a text with too many characters for the context even if its tokens are the longest."""
    limit = context.capacity * context.tokenizer.max_token_chars
    for text, name in zip(texts, names, strict=True):
        if len(text) > limit:
            raise ContextExceeded(
                f"The input ({len(text)} characters) is longer than the model's context length ({context.capacity} "
                "tokens) can hold; shorten it.",
                field=name,
                num_tokens=-(-len(text) // context.tokenizer.max_token_chars),
                capacity=context.capacity,
            )


async def encode(texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> list[list[int]]:
    """Returns the token ids of each text. Tokenizes long texts in a thread."""
    encoded = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
    return await offload.run_each(sum(map(len, texts)), encoded, texts)


def beginning(text: str, most: int, tokenizer: Tokenizer) -> str:
    """Returns a beginning of the text that contains its first `most` tokens, so that the rest, which may be megabytes,
    is not tokenized."""
    num_chars = (most + SPARE) * tokenizer.max_token_chars
    while num_chars < len(text) and len(tokenizer.encode(text[:num_chars], add_special_tokens=False)) < most + SPARE:
        num_chars *= 2
    return text[:num_chars]


def pair_beginnings(first: str, second: str, most: int, tokenizer: Tokenizer) -> list[str]:
    """Returns as much of both texts as a pair of `most` tokens needs. The text with more tokens has more of them in
    this, too, because a cut depends on which one is longer. Texts are read up to MOST_COMPARED characters."""
    texts = [first, second]
    parts = [beginning(text, most, tokenizer) for text in texts]
    if min(map(len, texts)) * MAX_BYTES <= most:
        return parts
    while parts != texts and first != second:
        counts = [len(tokenizer.encode(part, add_special_tokens=False)) for part in parts]
        longer = counts.index(max(counts))
        is_known = parts[1 - longer] == texts[1 - longer] and max(counts) > min(counts) + SPARE
        if is_known or max(map(len, parts)) >= MOST_COMPARED:
            break
        parts = [text[: 2 * len(part)] for text, part in zip(texts, parts, strict=True)]
    return parts


def check_tokens(token_ids: Sequence[int], name: str, context: Context) -> None:
    """Raises InvalidRequest for a text without tokens, and for a token of the tokenizer that the model does not
    have."""
    if not token_ids:
        raise InvalidRequest(f"{name} has no tokens; a prompt has at least one", field=name, code="empty_prompt")
    unknown = max(token_ids)
    if unknown >= context.info.vocab_size:
        text = context.tokenizer.token_text(unknown)
        raise InvalidRequest(
            f"{name} has {echo(text)}, token {unknown}, which is outside the model's vocabulary of "
            f"{context.info.vocab_size} tokens; leave it out",
            field=name,
            code="token_id_out_of_range",
        )
