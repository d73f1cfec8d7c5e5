"""`/compat`: of each API that clients speak, which fields are honoured, refused or differ; made of declarations."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tureen.api import (
    anthropic_fields,
    mindie,
    ollama_fields,
    openai_chat_fields,
    openai_completions,
    openai_embeddings,
    openai_responses_fields,
    sglang_request,
    tgi,
)
from tureen.api.dialect import Docs, Entry
from tureen.api.page import page
from tureen.api.sessions import SessionParams
from tureen.api.state import ServerState
from tureen.sampling.params import ALIASES, SamplingParams

NotOffered = Mapping[str, tuple[Any, str]]
Standing = Literal["honoured", "differs", "refused"]


class Part(NamedTuple):
    """An object of a body: the body itself, or one that stands in it under `name`."""

    struct: type[msgspec.Struct]
    not_offered: NotOffered = MappingProxyType({})
    name: str = ""
    aliases: Mapping[str, str] = MappingProxyType({})


class Spoken(NamedTuple):
    """One route of an API that was somebody else's first."""

    api: str
    route: str
    parts: tuple[Part, ...]
    differs: Mapping[str, str]  # field -> how it is not as in the original


class Row(NamedTuple):
    """What becomes of a field."""

    field: str
    standing: Standing
    note: str


OLLAMA_DIFFERS = {
    "think": "true or false, for models that can be told",
    "keep_alive": "the model always stays; 0 is refused",
    "options.num_ctx": "says what is needed, and is refused where the server has less",
    "options.repeat_penalty": "1 unless given; looks at the whole prompt and output",
}
SPOKEN: tuple[Spoken, ...] = (
    Spoken(
        "SGLang",
        "/generate",
        (
            Part(sglang_request.GenerateBody, sglang_request.NOT_OFFERED),
            Part(SamplingParams, sglang_request.PARAMS_NOT_OFFERED, "sampling_params", ALIASES),
            Part(SessionParams, name="session_params"),
        ),
        {
            "custom_logit_processor": "code of clients runs in a process without rights, once the operator allows it",
            "image_data": "files are read below --media-path alone, URLs of --allowed-media-domain alone",
            "lora_path": "names an adapter that is loaded; no request makes the server read a path",
            "sampling_params.json_schema": "a keyword that would not be enforced is refused",
            "sampling_params.max_new_tokens": "may be null: up to the context end",
            "sampling_params.top_k": "0 is refused; all tokens are -1",
            "video_data": "read as image_data is",
        },
    ),
    Spoken(
        "MindIE and vLLM's demo server",
        "/generate",
        (Part(mindie.MindieBody, mindie.NOT_OFFERED),),
        {
            "prompt": "a string, never a list of media",
            "max_tokens": "16 unless given, and refused where the context cannot hold it",
            "best_of": "all that were made are returned, the most probable first",
            "model": "names an adapter; an unknown one is refused",
            "stop_token_ids": "an id outside the vocabulary is refused",
            "stream": "pieces end with a NUL byte; what they hold: --mindie-full-text, --vllm-profile",
        },
    ),
    Spoken(
        "TGI",
        "/generate",
        (Part(tgi.TgiBody), Part(tgi.TgiParameters, tgi.NOT_OFFERED, "parameters")),
        {
            "parameters.max_new_tokens": "20 unless given",
            "parameters.repetition_penalty": "at most 2",
            "parameters.adapter_id": "names an adapter that is loaded",
            "parameters.grammar": "of type json, json_object or regex",
            "parameters.truncate": "does not make a prompt welcome that the context could never hold",
        },
    ),
    Spoken(
        "OpenAI",
        "/v1/completions",
        (Part(openai_completions.CompletionBody, openai_completions.NOT_OFFERED),),
        {"model": "may be left out; MODEL:ADAPTER names an adapter"},
    ),
    Spoken(
        "OpenAI",
        "/v1/chat/completions",
        (Part(openai_chat_fields.ChatBody, openai_chat_fields.NOT_OFFERED),),
        {"model": "may be left out; MODEL:ADAPTER names an adapter"},
    ),
    Spoken(
        "OpenAI",
        "/v1/responses",
        (Part(openai_responses_fields.ResponsesBody, openai_responses_fields.NOT_OFFERED),),
        {"model": "may be left out; MODEL:ADAPTER names an adapter"},
    ),
    Spoken(
        "OpenAI",
        "/v1/embeddings",
        (Part(openai_embeddings.EmbeddingsBody, openai_embeddings.NOT_OFFERED),),
        {
            "model": "may be left out; MODEL:ADAPTER names an adapter",
            "dimensions": "only for models that were trained to have their embeddings cut",
        },
    ),
    Spoken(
        "Anthropic",
        "/v1/messages",
        (Part(anthropic_fields.AnthropicBody, anthropic_fields.NOT_OFFERED),),
        {
            "model": "an unknown one is refused; there are no aliases",
            "messages": "text, image, thinking, tool_use and tool_result blocks; thinking is not signed",
            "cache_control": "changes nothing: prefixes are always kept for reuse, for as long as there is room",
            "metadata": "user_id is a label in the log at level debug",
            "thinking": "for models that can be told; what is thought is shown whole or omitted",
            "tools": "functions of the client; the server runs none",
        },
    ),
    Spoken(
        "Anthropic",
        "/v1/messages/count_tokens",
        (Part(anthropic_fields.AnthropicCountBody, anthropic_fields.NOT_OFFERED),),
        {},
    ),
    Spoken(
        "Ollama",
        "/api/chat",
        (
            Part(ollama_fields.OllamaChatBody, ollama_fields.NOT_OFFERED),
            Part(ollama_fields.OllamaOptions, ollama_fields.OPTIONS_NOT_OFFERED, "options"),
        ),
        OLLAMA_DIFFERS,
    ),
    Spoken(
        "Ollama",
        "/api/generate",
        (
            Part(ollama_fields.OllamaGenerateBody, ollama_fields.NOT_OFFERED),
            Part(ollama_fields.OllamaOptions, ollama_fields.OPTIONS_NOT_OFFERED, "options"),
        ),
        OLLAMA_DIFFERS,
    ),
)
LEAD = """\
<header><h1>What of each API is honoured</h1><a href="docs">routes and fields</a> <a href="compat.json">as JSON</a>
<p>Every field is acted on or refused by name. A field that is on no list is refused with the nearest name.</p></header>
"""


def routes(_: ServerState) -> list[Entry]:
    async def compat(request: Request) -> Response:
        kinds = request.headers.get("accept", "")
        if "application/json" in kinds and "text/html" not in kinds:
            return _as_json()
        return page("tureen: compatibility", LEAD + "".join(_section(one) for one in SPOKEN))

    async def compat_json(_: Request) -> Response:
        return _as_json()

    docs = Docs("Server", "Of each API: which fields are honoured, which refused.", answer="text/html")
    return [
        Entry("/compat", compat, access="open", docs=docs),
        Entry("/compat.json", compat_json, access="open", docs=docs._replace(answer="application/json")),
    ]


def rows_of(spoken: Spoken) -> Iterator[Row]:
    """Every field that has an answer of its own: those declared, then those that are not offered."""
    for part in spoken.parts:
        front = f"{part.name}." if part.name else ""
        for field in msgspec.structs.fields(part.struct):
            name, note = field.encode_name, spoken.differs.get(front + field.encode_name)
            if name not in part.not_offered:
                yield Row(front + name, "honoured" if note is None else "differs", note or _meaning(field.type))
        for alias, name in part.aliases.items():
            yield Row(front + alias, "honoured", f"The same as {name}.")
    for part in spoken.parts:
        front = f"{part.name}." if part.name else ""
        for name, (_, why) in sorted(part.not_offered.items()):
            yield Row(front + name, "refused", why)


def _meaning(kind: Any) -> str:
    """The description beside a declared type."""
    metas = [one for one in get_args(kind)[1:] if isinstance(one, msgspec.Meta)]
    return next((one.description for one in metas if one.description), "")


def _as_json() -> Response:
    table = [{"api": one.api, "route": one.route, "fields": [row._asdict() for row in rows_of(one)]} for one in SPOKEN]
    return Response(msgspec.json.encode({"apis": table}), media_type="application/json")


def _section(spoken: Spoken) -> str:
    lines = [
        f"<tr><td><code>{html.escape(row.field)}</code></td><td class={row.standing}>{row.standing}</td>"
        f"<td>{html.escape(row.note)}</td></tr>"
        for row in rows_of(spoken)
    ]
    heading = f"<h2>{html.escape(spoken.api)} <code>{spoken.route}</code></h2>"
    return f"{heading}<table><tr><th>field</th><th></th><th></th></tr>{''.join(lines)}</table>\n"
