"""Serves the routes of Triton (KServe v2) that MindIE has: `/v2/…`.

Source: https://www.hiascend.com/document/detail/zh/mindie/21RC2/mindieservice/servicedev/mindie_service0009.html and
https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from tureen import __version__
from tureen.config import MAX_PROMPTS
from tureen.dialects.mindie.generate import as_mindie, error_object
from tureen.dialects.mindie.parameters import (
    TABLES,
    MindieParameters,
    details_of,
    offered_fields,
    pieces_of,
    plan,
    times_since,
)
from tureen.errors import InvalidRequest
from tureen.fields.body import convert
from tureen.fields.shared import MAX_TOKEN_IDS, TokenIds
from tureen.http.chat_answer import check_complete
from tureen.http.dialect import PLAIN_ERROR, Docs, Entry, client_name, prepared, read_body_with, streamed, unless_gone
from tureen.http.sse import event
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output, Run
from tureen.requests.model_field import adapter_of
from tureen.requests.prompts import Prompt, id_lists
from tureen.requests.state import ServerState
from tureen.requests.tokenising import tokenize

MODEL = "/v2/models/{model:path}"
DATATYPE = "UINT32"

_json = msgspec.json.Encoder()

RequestId = Annotated[
    Annotated[str, Meta(min_length=1, max_length=256, pattern="^[0-9A-Za-z_-]+$")] | None,
    Meta(description="A name for the request, by which stopInfer aborts it."),
]
Parameters = Annotated[MindieParameters, Meta(description="Sampling parameters.")]
A = TypeVar("A", "TritonGenerateBody", "TritonInferBody", "TritonStopBody")
B = TypeVar("B", "TritonGenerateBody", "TritonInferBody")


class TritonGenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v2/models/NAME/generate` and `/generate_stream`."""

    text_input: Annotated[str, Meta(description="The prompt.", min_length=1)]
    id: RequestId = None
    parameters: Parameters = MindieParameters()


class TritonTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor of token ids."""

    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_IDS)]], Meta(max_length=2)]
    datatype: Literal["UINT32", "INT32", "INT64", "UINT64"]
    data: TokenIds


class TritonOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a tensor to return."""

    name: str


class TritonInferBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v2/models/NAME/infer`."""

    inputs: Annotated[
        list[TritonTensor], Meta(min_length=1, max_length=1, description="One tensor with the prompt's token ids.")
    ]
    id: RequestId = None
    outputs: Annotated[
        Annotated[list[TritonOutput], Meta(max_length=MAX_PROMPTS)], Meta(description="The tensor to return, by name.")
    ] = []
    parameters: Parameters = MindieParameters()


class TritonStopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v2/models/NAME/stopInfer`."""

    id: Annotated[str, Meta(min_length=1, max_length=256, description="The request to abort.")]


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""

    async def generate(request: Request) -> ASGIApp:
        body, run = await _begin(request, TritonGenerateBody, state)
        [output] = await unless_gone(request, run.whole())
        check_complete(output)
        answer = _answer(output, request) | _details(output, body)
        return Response(_json.encode(answer | times_since(0.0, output)), media_type="application/json")

    async def generate_stream(request: Request) -> ASGIApp:
        body, run = await _begin(request, TritonGenerateBody, state)
        head = _answer(run.outputs[0], request)
        return await streamed(request, _events(run, body, head), lambda error: event(_json.encode(error_object(error))))

    async def infer(request: Request) -> ASGIApp:
        body, run = await _begin(request, TritonInferBody, state)
        [output] = await unless_gone(request, run.whole())
        check_complete(output)
        name = body.outputs[0].name if body.outputs else "output0"
        tensor = {
            "name": name,
            "shape": [1, len(output.token_ids)],
            "datatype": DATATYPE,
            "data": output.token_ids,
        }
        return Response(_json.encode({"id": output.rid, "outputs": [tensor]}), media_type="application/json")

    async def stop(request: Request) -> Response:
        body = await read_body_with(request, lambda payload: _read(payload, TritonStopBody))
        state.abort(body.id, owner=client_name(request))
        return JSONResponse({"id": body.id})

    text = {"text_input": "My name is Olivier and I", "parameters": {"max_new_tokens": 8}}
    ids = {"inputs": [{"name": "input0", "shape": [1, 3], "datatype": DATATYPE, "data": [65, 66, 67]}]}
    streams = _docs("Continue a text, token by token.", TritonGenerateBody, text)._replace(stream="text/event-stream")
    return [
        _entry(f"{MODEL}/generate", generate, _docs("Continue a text.", TritonGenerateBody, text)),
        _entry(f"{MODEL}/generate_stream", generate_stream, streams),
        _entry(f"{MODEL}/infer", infer, _docs("Continue token ids.", TritonInferBody, ids)),
        _entry(f"{MODEL}/stopInfer", stop, _docs("Abort a request.", TritonStopBody, {"id": "a"}), is_limited=False),
        *_fact_routes(state),
    ]


def _fact_routes(state: ServerState) -> list[Entry]:
    async def server(_: Request) -> Response:
        return JSONResponse({"name": "tureen", "version": __version__, "extensions": []})

    async def live(_: Request) -> Response:
        return Response(media_type="text/plain")

    async def ready(_: Request) -> Response:
        state.check_accepting()
        return Response(media_type="text/plain")

    about = Docs("MindIE", "Facts about the server.", error=PLAIN_ERROR)
    health = about._replace(summary="Whether the server answers.", answer="text/plain")
    return [
        Entry("/v2", server, access="user", docs=about, render_error=as_mindie),
        Entry("/v2/health/live", live, access="open", docs=health, render_error=as_mindie),
        Entry("/v2/health/ready", ready, access="open", docs=health, render_error=as_mindie),
        *_model_routes(state),
    ]


def _model_routes(state: ServerState) -> list[Entry]:
    def entry(path: str, summary: str, fact: Callable[[str], Any], answer: str = "application/json") -> Entry:
        async def endpoint(request: Request) -> Response:
            name = request.path_params["model"]
            adapter_of(name, state)
            facts = fact(name)
            return Response(media_type="text/plain") if facts is None else JSONResponse(facts)

        docs = Docs("MindIE", summary, error=PLAIN_ERROR, answer=answer)
        facts_entry = Entry(path, endpoint, access="user", docs=docs, render_error=as_mindie)
        facts_entry.needs_engine = False
        return facts_entry

    return [
        entry(f"{MODEL}/ready", "Whether the model takes requests.", lambda _: state.check_accepting(), "text/plain"),
        entry(f"{MODEL}/config", "The model's limits.", lambda _: _limits(state)),
        entry(f"{MODEL}/getSlotCount", "Free request and token capacity.", lambda _: _room(state)),
        entry(MODEL, "The model's inputs and outputs.", _tensors),
    ]


def _tensors(name: str) -> dict[str, Any]:
    tensor = {"datatype": DATATYPE, "shape": [-1]}
    return {
        "name": name,
        "versions": [],
        "platform": "tureen",
        "inputs": [{"name": "input0"} | tensor],
        "outputs": [{"name": "output0"} | tensor],
    }


def _limits(state: ServerState) -> dict[str, Any]:
    context = state.context
    return {
        "modelName": context.info.model_name,
        "maxSeqLen": context.capacity,
        "maxIterTimes": context.config.max_iter_times or context.capacity,
    }


def _room(state: ServerState) -> dict[str, Any]:
    stats, info = state.client.stats, state.context.info
    return {
        "total_slots": info.max_running_requests,
        "free_slots": max(0, info.max_running_requests - stats.num_running),
        "available_tokens_length": (stats.num_free_pages + stats.num_cached_pages) * info.page_size,
    }


def _entry(path: str, endpoint: Callable[..., Any], docs: Docs, *, is_limited: bool = True) -> Entry:
    return Entry(
        path,
        endpoint,
        access="user",
        methods=["POST"],
        docs=docs,
        render_error=as_mindie,
        is_limited=is_limited,
    )


def _docs(summary: str, body: type[msgspec.Struct], example: dict[str, Any]) -> Docs:
    return Docs("MindIE", summary, (body,), example, error=PLAIN_ERROR)


def _read(payload: dict[str, Any], kind: type[A]) -> A:
    fields = offered_fields(payload, kind.__struct_fields__, TABLES["triton"])
    return convert(fields, kind, table=TABLES["parameters"])


async def _begin(request: Request, kind: type[B], state: ServerState) -> tuple[B, Run]:
    """Read the body and make its run. Raises InvalidRequest, NotFound."""
    state.check_accepting()
    body = await read_body_with(request, lambda payload: _read(payload, kind))
    return body, Run(state, await prepared(request, _plan(body, request, state)))


async def _plan(body: TritonGenerateBody | TritonInferBody, request: Request, state: ServerState) -> Plan:
    adapter = adapter_of(request.path_params["model"], state)
    rid, owner = body.id or uuid.uuid4().hex, client_name(request)
    if isinstance(body, TritonGenerateBody):
        [ids] = await tokenize([body.text_input], ["text_input"], state.context)
        return plan(body.parameters, Prompt(ids), "text_input", owner, state, rid=rid, adapter=adapter)
    [tensor] = body.inputs
    if math.prod(tensor.shape) != len(tensor.data):
        raise InvalidRequest(
            f"inputs[0].shape is {tensor.shape}, but data has {len(tensor.data)} numbers", field="inputs[0].shape"
        )
    [prompt] = id_lists(tensor.data, state.context, may_be_empty=False, field="inputs[0].data")
    return plan(body.parameters, prompt, "inputs[0].data", owner, state, rid=rid, adapter=adapter)


def _answer(output: Output, request: Request) -> dict[str, Any]:
    return {
        "id": output.rid,
        "model_name": request.path_params["model"],
        "model_version": None,
        "text_output": output.text,
    }


def _details(output: Output, body: TritonGenerateBody) -> dict[str, Any]:
    return {"details": details_of(output)} if body.parameters.details else {}


async def _events(run: Run, body: TritonGenerateBody, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield an event with the new text for each update with new tokens."""
    async with contextlib.aclosing(pieces_of(run)) as pieces:
        async for output, _, text, times in pieces:
            piece = head | {"text_output": text} | times
            yield event(_json.encode(piece if output.finish is None else piece | _details(output, body)))
