"""Serves `/tokenize` and `/detokenize`, as SGLang and vLLM have them: a text or a chat to token ids, and back; and
`/apply-template`, as llama.cpp has it: the text of a chat's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.params import JsonObject
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai import chat_body as openai_chat_fields
from tureen.dialects.openai.body import Thinking
from tureen.dialects.openai.chat_body import ChatBody, Effort, MessageField, ReasoningField
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import convert, offered, read_json
from tureen.fields.rules import FieldTable, FieldWithoutEffect
from tureen.fields.shared import MAX_INPUTS, MAX_TOKEN_IDS, TokenIds
from tureen.fields.tools import Tools, chosen_tools, read_tools
from tureen.http.dialect import Docs, Entry, unless_gone
from tureen.requests import batching, tokenising
from tureen.requests.chat_prompt import MESSAGE_CHARS, ChatMedia, ChatPrompt, chat_prompt
from tureen.requests.model_field import adapter_of
from tureen.requests.offload import offload
from tureen.requests.prompts import shown_ids
from tureen.requests.state import ServerState
from tureen.text.messages import MAX_MESSAGES

T = TypeVar("T", "TokenizeBody", "DetokenizeBody")


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /tokenize`."""

    prompt: Annotated[
        str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None,
        Meta(description="A text, or a list of at most 2048."),
    ] = None
    messages: Annotated[
        Annotated[list[MessageField], Meta(max_length=MAX_MESSAGES)] | None,
        Meta(description="A chat in place of a text, as in /v1/chat/completions."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Add the tokens that the tokenizer adds around a text. Default: true. Not for a chat."),
    ] = None
    tools: Annotated[Tools | None, Meta(description="For a chat: functions to call.")] = None
    continue_final_message: Annotated[bool, Meta(description="For a chat: its last message is continued.")] = False
    add_generation_prompt: Annotated[
        bool | None,
        Meta(description="For a chat: begin a new message at its end. Default: unless the last is continued."),
    ] = None
    chat_template_kwargs: Annotated[JsonObject | None, Meta(description="For a chat: template variables.")] = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | JsonObject | None,
        Meta(description="For a chat: none leaves the tools out, as in /v1/chat/completions."),
    ] = None
    reasoning_effort: Annotated[Effort | None, Meta(description="For a chat, as in /v1/chat/completions.")] = None
    reasoning: Annotated[ReasoningField | None, Meta(description="For a chat, as in /v1/chat/completions.")] = None
    thinking: Thinking = None
    return_token_strs: Annotated[bool, Meta(description="Return the text of each token too, as vLLM does.")] = False
    model: Annotated[str | None, Meta(description="The served model.")] = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /detokenize`."""

    tokens: Annotated[
        list[int | TokenIds],
        Meta(
            max_length=MAX_TOKEN_IDS,
            extra={"batch": MAX_INPUTS},
            description="Token ids, or a list of at most 2048 lists of them.",
        ),
    ]
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    model: Annotated[str | None, Meta(description="The served model.")] = None


CHAT_FIELDS = (
    "tools",
    "tool_choice",
    "continue_final_message",
    "add_generation_prompt",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "thinking",
)
FIELDS_TABLE = openai_fields.table_of("tokenize")
NOT_IN_PROMPT = frozenset(ChatBody.__struct_fields__).difference(
    TokenizeBody.__struct_fields__, FIELDS_TABLE.refused, ("skip_special_tokens",)
)
"""Fields of a chat that do not change its prompt."""
UNCHANGED = FieldWithoutEffect("it does not change the tokens of a prompt")
TABLE = FIELDS_TABLE.joined(FieldTable(told=dict.fromkeys(sorted(NOT_IN_PROMPT), UNCHANGED)))


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def tokenize(request: Request) -> ASGIApp:
        body = await _read(request, TokenizeBody, state)
        ids = await unless_gone(request, _token_ids(body, state))
        is_list = isinstance(body.prompt, list)
        counts = [len(token_ids) for token_ids in ids]
        answer: dict[str, Any] = {
            "tokens": ids if is_list else ids[0],
            "count": counts if is_list else counts[0],
            "max_model_len": state.context.capacity,
        }
        if body.return_token_strs:
            texts = [[state.context.tokenizer.token_text(token_id) for token_id in token_ids] for token_ids in ids]
            answer["token_strs"] = texts if is_list else texts[0]
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def detokenize(request: Request) -> ASGIApp:
        body = await _read(request, DetokenizeBody, state)
        texts = await unless_gone(request, _texts(_id_lists(body.tokens, state), body, state))
        text = texts if body.tokens and isinstance(body.tokens[0], list) else texts[0]
        return Response(
            msgspec.json.encode({"text": text, "prompt": text, "content": text}), media_type="application/json"
        )

    async def tokenizer_info(_: Request) -> ASGIApp:
        return Response(msgspec.json.encode(_tokenizer_facts(state)), media_type="application/json")

    about_tokens = Docs(
        "SGLang", "Tokenize a text or a chat.", bodies=(TokenizeBody,), example={"prompt": "The capital of France"}
    )
    about_text = Docs("SGLang", "Detokenize token ids.", bodies=(DetokenizeBody,), example={"tokens": [1, 2, 3]})
    entries = [
        Entry(f"/v1{path}", endpoint, access="user", methods=["POST"], any_model=True, docs=docs)
        for path, endpoint, docs in (("/tokenize", tokenize, about_tokens), ("/detokenize", detokenize, about_text))
    ]
    entries.append(_template_route(state))
    entries.append(
        Entry("/v1/tokenizer_info", tokenizer_info, access="user", docs=Docs("Server", "Facts about the tokenizer."))
    )
    for entry in entries:
        entry.needs_engine = False
    return entries


def _template_route(state: ServerState) -> Entry:
    async def apply_template(request: Request) -> ASGIApp:
        body = await _read(request, TokenizeBody, state)
        if body.messages is None or body.prompt is not None:
            raise InvalidRequest("messages is missing; send the chat, without prompt", field="messages")
        rendered = await unless_gone(request, _rendered(body, body.messages, state))
        return Response(msgspec.json.encode({"prompt": rendered.text}), media_type="application/json")

    docs = Docs(
        "llama.cpp",
        "The text of a chat's prompt.",
        bodies=(TokenizeBody,),
        example={"messages": [{"role": "user", "content": "Hello"}]},
    )
    return Entry("/apply-template", apply_template, access="user", methods=["POST"], docs=docs)


async def _read(request: Request, kind: type[T], state: ServerState) -> T:
    """Reads a request's body as `kind`. Raises InvalidRequest, and NotFound for an unknown model."""
    payload = read_json(request.headers.get("content-type"), await request.body())
    openai_chat_fields.check_no_template(payload)
    body = convert(offered(payload, kind.__struct_fields__, TABLE), kind, table=TABLE)
    adapter_of(body.model, state)
    return body


async def _token_ids(body: TokenizeBody, state: ServerState) -> list[list[int]]:
    """Returns the token ids of each text; of a chat one list. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        got = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"send either prompt or messages; got {got}", field="prompt")
    if body.messages is not None:
        rendered = await _rendered(body, body.messages, state)
        return [shown_ids(rendered.prompt.token_ids, state.context)]
    for name in CHAT_FIELDS:
        if getattr(body, name) not in (None, False):
            raise InvalidRequest(f"{name} needs messages in place of prompt", field=name)
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    batching.check_count(len(texts), "prompt")
    return await tokenising.encode(
        texts, state.context.tokenizer, add_special_tokens=body.add_special_tokens is not False
    )


async def _rendered(body: TokenizeBody, messages: Sequence[MessageField], state: ServerState) -> ChatPrompt:
    """Return the prompt of a chat. Raises InvalidRequest."""
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is for prompt: the chat template adds them to messages", field="add_special_tokens"
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt cannot be true if continue_final_message is true; leave it out",
            field="add_generation_prompt",
        )
    chat_messages = await offload.run(
        len(messages) * MESSAGE_CHARS, lambda: openai_chat_fields.convert_messages(messages)
    )
    chosen = chosen_tools(body.tool_choice, read_tools(body.tools, custom=True))
    tools = () if chosen.choice.mode == "none" else chosen.tools
    return await chat_prompt(
        chat_messages.messages,
        tools,
        state,
        media=ChatMedia(
            tuple(chat_messages.pictures), tuple(chat_messages.videos), next(iter(chat_messages.modalities), None)
        ),
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=openai_chat_fields.template_kwargs(body, tools, state),
    )


def _tokenizer_facts(state: ServerState) -> dict[str, Any]:
    """Returns facts about the tokenizer, by the names of its configuration file."""
    templates, tokenizer = state.context.chat_templates, state.context.tokenizer
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": state.context.capacity,
        **tokenizer.named_tokens,
        "chat_template": None if isinstance(templates, str) else templates.plain.source,
    }


def _id_lists(tokens: Sequence[Any], state: ServerState) -> list[list[int]]:
    """Returns the lists of ids that `tokens` has, or its only list. Raises InvalidRequest."""
    is_batch = bool(tokens) and isinstance(tokens[0], list)
    lists: list[Any] = list(tokens) if is_batch else [list(tokens)]
    batching.check_count(len(lists), "tokens")
    limit = max(state.context.info.vocab_size, state.context.tokenizer.vocab_size)
    for index, ids in enumerate(lists):
        where = f"tokens[{index}]" if is_batch else "tokens"
        if not isinstance(ids, list) or list in set(map(type, ids)):
            raise InvalidRequest("tokens mixes token ids and lists of them; send one or the other", field="tokens")
        if ids and (min(ids) < 0 or max(ids) >= limit):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequest(
                f"{where} must be token ids in [0, {limit}), got {echo(wrong)}",
                field=where,
                code="token_id_out_of_range",
            )
    return lists


async def _texts(lists: Sequence[Sequence[int]], body: DetokenizeBody, state: ServerState) -> list[str]:
    tokenizer = state.context.tokenizer

    def decoded(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)

    return await offload.run_each(sum(map(len, lists)), decoded, lists)
