"""Serves SGLang's `/load_lora_adapter` and `/unload_lora_adapter`, which change the LoRA adapters of a running
server."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest, echo
from tureen.http.dialect import Docs, Entry, read_body
from tureen.requests.state import ServerState


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /load_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name that requests will use for the adapter.")]
    lora_path: Annotated[
        str, Meta(min_length=1, description="Folder on the server, as peft's save_pretrained writes it.")
    ]
    pinned: Annotated[bool, Meta(description="Never evicted; here no adapter is, pinned or not.")] = False


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /unload_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name of the loaded adapter.")]


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def load(request: Request) -> Response:
        body = await read_body(request, LoadBody)
        if body.lora_name == state.context.info.model_name:
            raise InvalidRequest(
                f"lora_name {echo(body.lora_name)} is the model's own name; choose another", field="lora_name"
            )
        return await _call("load_adapter", name=body.lora_name, path=body.lora_path)

    async def unload(request: Request) -> Response:
        body = await read_body(request, UnloadBody)
        return await _call("unload_adapter", name=body.lora_name)

    async def _call(op: str, **args: str) -> Response:
        loaded = await state.change_adapters(op, **args)
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded})

    return [
        Entry(
            "/load_lora_adapter",
            load,
            access="admin",
            methods=["POST"],
            docs=Docs(
                "Adapters",
                "Load one.",
                bodies=(LoadBody,),
                example={"lora_name": "whisper", "lora_path": "examples/adapters/whisper"},
            ),
        ),
        Entry(
            "/unload_lora_adapter",
            unload,
            access="admin",
            methods=["POST"],
            docs=Docs("Adapters", "Unload one.", bodies=(UnloadBody,), example={"lora_name": "whisper"}),
        ),
    ]
