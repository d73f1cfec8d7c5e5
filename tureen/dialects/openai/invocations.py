"""Serves `/invocations`, the one path that SageMaker calls: the body says which of OpenAI's routes it is for.

Source: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html, and the routes of that name
of SGLang and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from tureen.dialects.openai.chat_body import ChatBody
from tureen.dialects.openai.completions import CompletionBody
from tureen.dialects.openai.embeddings import EmbeddingsBody
from tureen.errors import InvalidRequest
from tureen.fields.body import read_json
from tureen.http.dialect import Docs, Entry
from tureen.requests.state import ServerState

GENERATING = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
EMBEDDING = {"input": "/v1/embeddings"}
"""The field that tells a body's route -> the route."""


def routes(state: ServerState, entries: Sequence[Entry]) -> list[Entry]:
    """Returns the route; `entries`: OpenAI's, to which it hands requests on."""
    is_embedding = state.context.info.kind != "generator"
    paths = EMBEDDING if is_embedding else GENERATING | EMBEDDING
    endpoints = {name: _endpoint(entries, path) for name, path in paths.items()}

    async def invocations(request: Request) -> Any:
        payload = read_json(request.headers.get("content-type"), await request.body())
        names = [name for name in endpoints if payload.get(name) is not None]
        if len(names) != 1:
            choices = ", ".join(f"{name} (as {path})" for name, path in paths.items())
            got = " and ".join(names) or "none of them"
            raise InvalidRequest(f"send exactly one of {choices}; got {got}", field=next(iter(paths)))
        return await endpoints[names[0]](request)

    docs = Docs(
        "OpenAI",
        "SageMaker's path: a chat, a completion or embeddings, as the body says.",
        bodies=(ChatBody, CompletionBody, EmbeddingsBody),
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        stream="text/event-stream",
    )
    return [Entry("/invocations", invocations, access="user", methods=["POST"], any_model=is_embedding, docs=docs)]


def _endpoint(entries: Sequence[Entry], path: str) -> Any:
    return next(entry.endpoint for entry in entries if entry.path == path)
