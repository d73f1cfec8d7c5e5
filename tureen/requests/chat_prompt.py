"""Turns a chat's messages into a prompt: renders the template, guards against control tokens, inserts pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tureen.errors import InvalidRequest
from tureen.media.base import Modality
from tureen.requests import media_fields, tokenising
from tureen.requests.media_fields import PromptMedia
from tureen.requests.offload import INLINE_CHARS, LARGE, offload
from tureen.requests.prompts import Prompt
from tureen.requests.state import Context, ServerState
from tureen.requests.template_pool import do, template_pool
from tureen.text.chat_template import Rendering
from tureen.text.control_tokens import ControlTokens
from tureen.text.messages import MAX_MESSAGES, Message, Tool

MESSAGE_CHARS = 128
"""Cost of rendering one message in addition to its text, in characters: a small chat is rendered on the event loop."""

PLAIN = frozenset(("role", "content", "reasoning_content"))
"""Keys of messages whose size is known without inspecting them. Only chats with such keys are rendered on the event
loop."""


class ChatPrompt(NamedTuple):
    """A rendered and tokenized chat."""

    prompt: Prompt
    text: str  # the rendered template
    num_neutralised: int  # control tokens spelled in messages, which were tokenized as plain text


class ChatMedia(NamedTuple):
    """The pictures and videos of a chat: URLs, data URLs or paths, one for each {"type": "image"} or {"type": "video"}
    in order."""

    pictures: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    modality: Modality | None = None  # of the pictures; None: as their number says


NO_MEDIA = ChatMedia()


async def chat_prompt(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    state: ServerState,
    *,
    field: str = "messages",
    media: ChatMedia = NO_MEDIA,
    continue_final_message: bool = False,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Renders and tokenizes a chat, fetches its pictures and videos, and inserts them.

    Raises InvalidRequest with `field`, Forbidden.
    """
    modality = media.modality or media_fields.picture_modality(len(media.pictures))
    prompt_media = PromptMedia(media.pictures, media.videos, modality, picture_field=field, video_field=field)
    tokenising.check_takes(prompt_media, state)
    rendered = await chat_tokens(
        messages,
        tools,
        state.context,
        field=field,
        continue_final_message=continue_final_message,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
    )
    [prompt] = await tokenising.resolve([rendered.prompt], [field], state, [prompt_media])
    return rendered._replace(prompt=prompt)


async def chat_tokens(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    context: Context,
    *,
    field: str = "messages",
    continue_final_message: bool = False,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Renders and tokenizes a chat, with PICTURE or VIDEO for each picture or video. Fetches none of them.

    Raises InvalidRequest with `field`.
    """
    templates = context.chat_templates
    if isinstance(templates, str):
        raise InvalidRequest(f"{field}: {templates}", field=field, code="no_chat_template")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"{field} make {len(messages)} messages; a chat has at most {MAX_MESSAGES}: join or drop some", field=field
        )

    template = templates.of(tools)

    def prepare() -> Rendering:
        return template.prepare(
            messages,
            tools,
            field=field,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def encode(rendering: Rendering, answer: Callable[[], bytes]) -> ChatPrompt:
        return _encode(rendering.finish(answer), templates.controls, field, context)

    def all_at_once() -> ChatPrompt:
        rendering = prepare()
        return encode(rendering, lambda: do(rendering.job))

    pool = template_pool()
    is_short = not tools and not template_kwargs and _is_short(messages)
    if is_short and pool is not None and template.is_probed:
        rendering = prepare()
        answer = await pool.do_soon(rendering.job)
        return encode(rendering, lambda: answer)
    return await offload.run(0 if is_short and pool is None else LARGE, all_at_once)


def _encode(rendered: str, controls: ControlTokens, field: str, context: Context) -> ChatPrompt:
    """Tokenize a rendered chat. Raises InvalidRequest with `field`."""
    if context.family is not None:
        rendered = tokenising.spaced(rendered, context.family, controls.alias(context.family.placeholder))
    text = controls.plain(rendered)
    tokenising.check_lengths([text], [field], context)
    try:
        encoded = controls.encode(rendered)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", field=field) from None
    tokenising.check_tokens(encoded.token_ids, field, context)
    return ChatPrompt(Prompt(encoded.token_ids), text, encoded.num_neutralised)


def _is_short(messages: Sequence[Message]) -> bool:
    return (
        len(messages) * MESSAGE_CHARS <= INLINE_CHARS
        and all(message.keys() <= PLAIN for message in messages)
        and sum(MESSAGE_CHARS + _num_chars(message) for message in messages) <= INLINE_CHARS
    )


def _num_chars(message: Message) -> int:
    """Returns the approximate number of characters of text in a message."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(map(len, texts)) + len(message.get("reasoning_content") or "")
