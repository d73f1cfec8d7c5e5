"""Serves `/generate_from_file`: `/generate` with embeddings from a file, uploaded or below --media-path.

Source: SGLang's server before 0.5, which took an upload.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.params import JsonObject
from tureen.dialects.sglang import generate
from tureen.dialects.sglang.body import PROMPT_FIELDS
from tureen.errors import Forbidden, InvalidRequest, echo
from tureen.http.dialect import BYTES_PER_CHAR, Docs, Entry, client_name, prepared, read_body, unless_gone
from tureen.media.files import media_root, read_below
from tureen.requests.offload import offload
from tureen.requests.state import ServerState

FORM = "multipart/form-data"
UPLOAD_PARAMS = {"temperature": 0.0, "max_new_tokens": 512}
"""Parameters for an upload, as in SGLang: its form has no room for them."""


class GenerateFromFileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /generate_from_file`."""

    file: Annotated[str, Meta(description="A JSON file below --media-path with the input_embeds of /generate.")]
    parameters: Annotated[
        JsonObject, Meta(description="The other fields of /generate, such as sampling_params; no stream.")
    ] = msgspec.field(default_factory=dict)


def routes(state: ServerState) -> list[Entry]:
    """Returns the route."""
    config = state.context.config
    root = media_root(config.media_path, config.host)

    async def read(request: Request) -> tuple[bytes, dict[str, Any]]:
        """Returns the file, and the other fields of `/generate`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == FORM:
            return await _upload(request), {"sampling_params": UPLOAD_PARAMS}
        body = await read_body(request, GenerateFromFileBody)
        check_parameters(body.parameters)
        data = None if root is None else await asyncio.to_thread(read_below, root, body.file)
        if data is None:
            raise Forbidden(
                f"file {echo(body.file)} cannot be read: upload it, or name one below --media-path",
                field="file",
            )
        return data, body.parameters

    async def generate_from_file(request: Request) -> ASGIApp:
        state.check_accepting()
        data, parameters = await read(request)
        fields = parameters | {"input_embeds": await offload.run(len(data) // BYTES_PER_CHAR, _decoded, data)}
        plan = await prepared(request, generate.prepare(fields, state, owner=client_name(request)))
        answers = await unless_gone(request, generate.answer(plan, state))
        return Response(await generate.encode(answers, answers), media_type="application/json")

    docs = Docs(
        "SGLang",
        "Generate from embeddings in a file on the server.",
        bodies=(GenerateFromFileBody,),
        example={"file": "prompt.json", "parameters": {"sampling_params": {"max_new_tokens": 4}}},
    )
    return [Entry("/generate_from_file", generate_from_file, access="user", methods=["POST"], docs=docs)]


async def _upload(request: Request) -> bytes:
    """Returns the file of a form. Raises InvalidRequest."""
    from tureen.http.multipart import read_form  # noqa: PLC0415 - few servers are sent files

    data = bytearray()

    async def add(piece: bytes) -> None:
        data.extend(piece)

    await request.body()  # kept: whether the client leaves is asked of the request later
    form = await read_form(request, "file", add)
    if form.fields:
        name = next(iter(form.fields))
        raise InvalidRequest(
            f"{echo(name)} is not a field of this form, which has only file; send JSON to set parameters", field=name
        )
    return bytes(data)


def check_parameters(parameters: dict[str, Any]) -> None:
    """Raises InvalidRequest for fields of `/generate` that stand elsewhere, or have no place in the answer."""
    for name in (*PROMPT_FIELDS, "image_data"):
        if parameters.get(name) is not None:
            raise InvalidRequest(f"parameters.{name} is not allowed: file is the prompt", field=f"parameters.{name}")
    if parameters.get("stream"):
        raise InvalidRequest("parameters.stream cannot be true here; use /generate", field="parameters.stream")


def _decoded(data: bytes) -> list[Any]:
    """Raises InvalidRequest for a file that is no JSON array."""
    try:
        return msgspec.json.decode(data, type=list[Any])
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise InvalidRequest("file does not hold a JSON list of embeddings", field="file") from None
