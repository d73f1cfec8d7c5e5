"""Serves `/classify` and `/v1/classify`: the probabilities of a classifier's labels for texts, as vLLM does.

Source: https://docs.vllm.ai/en/latest/models/pooling_models/classify.html
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.errors import InvalidRequest
from tureen.fields.body import convert, offered, read_json, require_equal
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_INPUTS, AbortName, KeptTokens, Priority
from tureen.http.dialect import Docs, Entry, client_name, unless_gone
from tureen.requests import batching, pairs, planning
from tureen.requests.batching import Requester
from tureen.requests.model_field import adapter_of, check_kind
from tureen.requests.pairs import Pair, Scored
from tureen.requests.state import ServerState

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["classify"]

TextPair = Annotated[list[str], Meta(min_length=2, max_length=2)]
Texts = str | Annotated[list[str | TextPair], Meta(max_length=MAX_INPUTS)]


class ClassifyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /classify`."""

    input: Annotated[
        Texts | None, Meta(description="A text, or a list of texts or of pairs of texts; at most 2048.")
    ] = None
    text: Annotated[Texts | None, Meta(description="SGLang's name of input.")] = None
    truncate_prompt_tokens: KeptTokens = None
    model: Annotated[str | None, Meta(description="The served model.")] = None
    rid: AbortName = None
    priority: Priority = 0


def routes(state: ServerState) -> list[Entry]:
    """Returns the route."""

    async def classify(request: Request) -> ASGIApp:
        payload = read_json(request.headers.get("content-type"), await request.body())
        state.check_accepting()
        body = convert(offered(payload, ClassifyBody.__struct_fields__, TABLE), ClassifyBody, table=TABLE)
        check_kind(state.context.info, "classifier")
        answer = await unless_gone(request, _classify(body, Requester(client_name(request), body.rid), state))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    docs = Docs(
        "SGLang",
        "Return the probabilities of a classifier's labels, in vLLM's form.",
        bodies=(ClassifyBody,),
        example={"input": ["A cat sleeps on the sofa."]},
    )
    entry = Entry("/classify", classify, access="user", methods=["POST", "PUT"], any_model=True, docs=docs)
    return [entry, entry.at("/v1/classify")]


async def _classify(body: ClassifyBody, requester: Requester, state: ServerState) -> dict[str, Any]:
    info = state.context.info
    assert info.classifier is not None
    planning.check_priority(body.priority, state.context)
    adapter_of(body.model, state)
    field, sent = _sent(body)
    inputs = [sent] if isinstance(sent, str) else sent
    batching.check_count(len(inputs), field)
    names = [field] if isinstance(sent, str) else [f"{field}[{index}]" for index in range(len(inputs))]
    texts = [Pair(entry) if isinstance(entry, str) else Pair(*entry) for entry in inputs]
    for pair, name in zip(texts, names, strict=True):
        if not pair.first or pair.second == "":
            raise InvalidRequest(f"{name} has an empty text", field=name, code="empty_prompt")
    scored = await pairs.classify(
        texts,
        names,
        info.classifier.label_activation,
        requester,
        state,
        truncate=body.truncate_prompt_tokens,
        priority=body.priority,
    )
    num_tokens = sum(score.output.usage.prompt_tokens for score in scored)
    return {
        "id": scored[0].output.rid,
        "object": "list",
        "created": int(time.time()),
        "model": body.model or info.model_name,
        "data": [_entry(index, score, info.classifier.labels) for index, score in enumerate(scored)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
    }


def _sent(body: ClassifyBody) -> tuple[str, Texts]:
    """Returns the field with the texts, and the texts. Raises InvalidRequest."""
    if body.input is None and body.text is None:
        raise InvalidRequest("input is missing; send a text, or a list of texts or of pairs of texts", field="input")
    if body.input is None:
        return "text", [] if body.text is None else body.text
    if body.text is not None:
        require_equal("text", body.text, "input", body.input)
    return "input", body.input


def _entry(index: int, scored: Scored, labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        "index": index,
        "label": labels[int(np.argmax(scored.scores))],
        "probs": scored.scores.tolist(),
        "num_classes": len(labels),
    }
