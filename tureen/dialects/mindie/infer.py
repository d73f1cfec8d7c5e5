"""Serves MindIE's own `/infer` and `/infer_token`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.dialects.mindie.generate import as_mindie, error_object
from tureen.dialects.mindie.parameters import (
    TABLES,
    MindieParameters,
    check_one,
    details_of,
    offered_fields,
    pieces_of,
    plan,
)
from tureen.fields.body import convert
from tureen.fields.shared import TokenIds
from tureen.http.chat_answer import check_complete
from tureen.http.dialect import PLAIN_ERROR, Docs, Entry, client_name, prepared, read_body_with, streamed, unless_gone
from tureen.http.sse import event
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output, Run
from tureen.requests.prompts import Prompt, id_lists
from tureen.requests.state import ServerState
from tureen.requests.tokenising import tokenize

_json = msgspec.json.Encoder()


class MindieInferBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /infer`."""

    inputs: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="The prompt.")] = None
    input_id: Annotated[TokenIds | None, Meta(description="The prompt's token ids, in place of inputs.")] = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events, one a token.")] = False
    parameters: Annotated[MindieParameters, Meta(description="Sampling parameters.")] = MindieParameters()


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""

    async def infer(request: Request) -> ASGIApp:
        state.check_accepting()
        body = await read_body_with(request, _read)
        run = Run(state, await prepared(request, _plan(body, client_name(request), state)))
        if body.stream:
            pieces = _events(run, with_details=body.parameters.details)
            return await streamed(request, pieces, lambda error: event(_json.encode(error_object(error))))
        [output] = await unless_gone(request, run.whole())
        check_complete(output)
        answer = {"generated_text": output.text} | _details(output, with_details=body.parameters.details)
        return Response(_json.encode(answer), media_type="application/json")

    docs = Docs(
        "MindIE",
        "Continue a text.",
        bodies=(MindieInferBody,),
        example={"inputs": "My name is Olivier and I", "parameters": {"max_new_tokens": 8, "details": True}},
        stream="text/event-stream",
        error=PLAIN_ERROR,
    )
    return [
        Entry(path, infer, access="user", methods=["POST"], docs=docs, render_error=as_mindie)
        for path in ("/infer", "/infer_token")
    ]


def _read(payload: dict[str, Any]) -> MindieInferBody:
    fields = offered_fields(payload, MindieInferBody.__struct_fields__, TABLES["infer"])
    body = convert(fields, MindieInferBody, table=TABLES["parameters"])
    check_one(body.inputs, body.input_id, ("inputs", "input_id"))
    return body


async def _plan(body: MindieInferBody, owner: str, state: ServerState) -> Plan:
    if body.inputs is not None:
        [ids] = await tokenize([body.inputs], ["inputs"], state.context)
        return plan(body.parameters, Prompt(ids), "inputs", owner, state)
    [prompt] = id_lists(body.input_id or [], state.context, may_be_empty=False, field="input_id")
    return plan(body.parameters, prompt, "input_id", owner, state)


def _details(output: Output, *, with_details: bool) -> dict[str, Any]:
    if not with_details:
        return {}
    return {"details": details_of(output) | {"generated_token_ids": output.token_ids}}


async def _events(run: Run, *, with_details: bool) -> AsyncGenerator[bytes, None]:
    """Yield an event for each update with new tokens; the last has the whole text."""
    async with contextlib.aclosing(pieces_of(run)) as pieces:
        async for output, token_ids, text, times in pieces:
            piece = times | {"token": {"id": token_ids, "text": text}}
            if output.finish is not None:
                piece |= {"generated_text": output.text} | _details(output, with_details=with_details)
            yield event(_json.encode(piece))
