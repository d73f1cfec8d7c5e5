"""Serves the routes by which a trainer sends weights over HTTP: SGLang's, vLLM's, and one that takes safetensors."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.admin.training_routes import Flag, is_true, read_query
from tureen.admin.weight_exchange import ExchangeOptions, Version, not_updated
from tureen.admin.weight_updates import WeightUpdates
from tureen.errors import InvalidRequest, UnsupportedMediaType, echo
from tureen.http.dialect import Docs, Entry, RenderError, read_body

BINARY = ("application/octet-stream", "application/vnd.safetensors", "application/safetensors")
PICKLE_MARKS = (b"\x80", b"PK\x03\x04")
"""First bytes of a pickle, and of the zip file that torch.save makes of one."""

SEND_SAFETENSORS = (
    "Send safetensors instead: base64.b64encode(safetensors.torch.save(dict(named_tensors))).decode() in its place, or "
    "the bytes of safetensors.torch.save as the body of POST /update_weights_from_safetensors"
)

Cached = Annotated[bool, Meta(description="false has no effect: what the old weights computed is always forgotten.")]
Partial = Annotated[bool, Meta(description="Weights that have not arrived keep their values; else they are missing.")]


class BeginBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /begin_weight_update` and vLLM's `/start_weight_update`."""

    selector: Annotated[
        Literal["all", "target"], Meta(description="Both values update the model. The draft model is never updated.")
    ] = "all"
    is_checkpoint_format: Annotated[
        Literal[True], Meta(description="Must be true: names and shapes are those of the checkpoint.")
    ] = True


class EndBody(ExchangeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /end_weight_update` and vLLM's `/finish_weight_update`."""

    partial: Partial = False
    flush_cache: Cached = True


class TensorBody(ExchangeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /update_weights_from_tensor`."""

    serialized_named_tensors: Annotated[
        list[str],
        Meta(
            min_length=1,
            max_length=1024,
            description="Safetensors in base64; equal ones, of several ranks, count once.",
        ),
    ]
    load_format: Annotated[
        Literal["auto", "direct"] | None, Meta(description="Safetensors say all; there are no other formats.")
    ] = None
    flush_cache: Cached = True
    disable_draft_model: Annotated[bool | None, Meta(description="The draft model is never updated.")] = None


class SafetensorsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `POST /update_weights_from_safetensors`."""

    partial: Annotated[Flag, Meta(description="true: weights that are not in the body keep their values.")] = "false"
    sha256: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None,
        Meta(description="SHA-256 of the body, in hexadecimal. A body with another one is refused."),
    ] = None
    weight_version: Version = None
    abort_all_requests: Annotated[Flag, Meta(description="true: end all requests first.")] = "false"
    rolling: Annotated[Flag, Meta(description="true: one replica after the other; requests go on.")] = "false"
    keep_pause: Annotated[Flag, Meta(description="true: pause generation afterwards.")] = "false"
    model: Annotated[str | None, Meta(description="One of several models. Default: the first.")] = None


class SafetensorsEntry(Entry):
    """A route whose body is as large as the model's weights, which its endpoint knows."""

    max_body_bytes = 1 << 50


def routes(updates: WeightUpdates) -> list[Entry]:
    """Return the routes."""
    return [*_session_routes(updates), *_body_routes(updates)]


def _session_routes(updates: WeightUpdates) -> list[Entry]:
    async def begin(request: Request) -> Response:
        await read_body(request, BeginBody)
        await updates.begin()
        return JSONResponse({"success": True, "message": "Weight update started"})

    async def end(request: Request) -> Response:
        body = await read_body(request, EndBody)
        num_paused = await updates.end(body, is_partial=body.partial)
        return JSONResponse(updates.success("Weight update finished", num_paused, body))

    async def abort(_: Request) -> Response:
        message = "Weight update dropped" if updates.abort() else "No weight update was open"
        return JSONResponse({"success": True, "message": message})

    beginning = Docs("Control", "Begin an update of the weights.", (BeginBody,), {})
    ending = Docs("Control", "Compute with the weights that arrived.", (EndBody,), {"weight_version": "step-200"})
    return [
        *(admin_entry(path, begin, beginning) for path in ("/begin_weight_update", "/start_weight_update")),
        *(admin_entry(path, end, ending) for path in ("/end_weight_update", "/finish_weight_update")),
        admin_entry("/abort_weight_update", abort, Docs("Control", "Drop an update that was begun.")),
    ]


def _body_routes(updates: WeightUpdates) -> list[Entry]:
    async def from_tensor(request: Request) -> Response:
        body = await read_body(request, TensorBody)
        files = [_decoded(text, index) for index, text in enumerate(body.serialized_named_tensors)]
        async with updates.part(body, is_partial=True) as part:
            for data in dict.fromkeys(files):
                await part.write(_once(data), len(data), None)
        return JSONResponse(updates.arrived(part, body))

    async def from_safetensors(request: Request) -> Response:
        kind = request.headers.get("content-type", BINARY[0]).partition(";")[0].strip().lower()
        if kind not in BINARY:
            raise UnsupportedMediaType(f"Content-Type must be {BINARY[0]}, got {echo(kind)}")
        query = read_query(request, SafetensorsQuery)
        options = ExchangeOptions(
            weight_version=query.weight_version,
            **{name: is_true(getattr(query, name)) for name in ("abort_all_requests", "rolling", "keep_pause")},
        )
        length = request.headers.get("content-length", "")
        declared = int(length[:18]) if length.isdigit() else 0
        async with updates.part(options, is_partial=is_true(query.partial)) as part:
            await part.write(request.stream(), declared, query.sha256)
        return JSONResponse(updates.arrived(part, options))

    tensors = Docs("Control", "Take weights as safetensors in JSON.", (TensorBody,), {"serialized_named_tensors": [""]})
    binary = Docs("Control", "Take weights as a safetensors file.", query=SafetensorsQuery)
    path = "/update_weights_from_safetensors"
    return [
        admin_entry("/update_weights_from_tensor", from_tensor, tensors),
        SafetensorsEntry(
            path, from_safetensors, access="admin", methods=["POST"], docs=binary, render_error=not_updated
        ),
    ]


def admin_entry(path: str, endpoint: Any, docs: Docs, render_error: RenderError = not_updated) -> Entry:
    """Return a route for operators, with errors that SGLang's clients read."""
    return Entry(path, endpoint, access="admin", methods=["POST"], docs=docs, render_error=render_error)


def _decoded(text: str, index: int) -> bytes:
    """Return the bytes of base64. Raise InvalidRequest for anything else, and for a pickle."""
    field = f"serialized_named_tensors[{index}]"
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field} is not base64. {SEND_SAFETENSORS}", field=field) from None
    if data.startswith(PICKLE_MARKS):
        raise InvalidRequest(
            f"{field} is a pickle. Reading a pickle can run any code, so this server reads none. {SEND_SAFETENSORS}",
            field=field,
            code="pickle_refused",
        )
    return data


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
