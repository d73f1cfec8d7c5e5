"""Serves OpenAI's and Anthropic's `/v1/models`, `/status`, and what loads and unloads models, where a server has
several, and their LoRA adapters: SGLang's `/load_lora_adapter` and `/unload_lora_adapter`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tureen.admin.anthropic_models import anthropic_card, anthropic_page, is_from_anthropic_client
from tureen.admin.replica_routes import replica_report
from tureen.errors import InvalidRequest, TureenError, echo
from tureen.fields.body import convert, refuse_unknown
from tureen.http.dialect import Docs, Entry, read_body
from tureen.http.errors import error_answer, error_object
from tureen.requests.model_field import is_served, unknown_model
from tureen.requests.state import ServedModel, ServedModels, ServerState


class ModelNameBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /models/load`, `/models/unload` and `/models/pull`."""

    model: Annotated[str, Meta(min_length=1, description="Name of one of the server's models.")]


class LiveQuery(msgspec.Struct, frozen=True):
    """The query of `GET /status/live`."""

    after: Annotated[int, Meta(ge=0, description="Number of the newest sample that the client already has.")] = 0


class UsageQuery(msgspec.Struct, frozen=True):
    """The query of `GET /usage`."""

    format: Annotated[Literal["json", "csv"], Meta(description="csv = one line for each client and day.")] = "json"


AdapterFolder = Annotated[
    str,
    Meta(min_length=1, max_length=4096, description="Folder on the server, as peft's save_pretrained writes it."),
]
"""A path, no longer than Linux takes it (PATH_MAX)."""


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /load_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name that requests will use for the adapter.")]
    lora_path: AdapterFolder
    pinned: Annotated[bool, Meta(description="Never evict the adapter; this server evicts none anyway.")] = False


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /unload_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name of the loaded adapter.")]


class VllmLoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/load_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name that requests will use for the adapter.")]
    lora_path: AdapterFolder
    load_inplace: Annotated[bool, Meta(description="Replace the adapter that has this name.")] = False
    is_3d_lora_weight: Annotated[bool, Meta(description="Must be false: factors of experts are read as peft's.")] = (
        False
    )


class VllmUnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name of the loaded adapter.")]
    lora_int_id: Annotated[int | None, Meta(description="vLLM's number; ignored, the name decides.")] = None


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""
    return [
        *_list_routes(state),
        *_look_routes(state),
        *_control_routes(state),
        *_adapter_routes(state),
        *_vllm_adapter_routes(state),
    ]


def _given(name: str) -> str:
    """Returns a name. Raises HTTPException for an empty one, which redirects to the list."""
    if not name:
        raise HTTPException(404)
    return name


def _list_routes(state: ServerState) -> list[Entry]:
    started = int(time.time())

    def all_cards() -> list[dict[str, Any]]:
        if state.common.models is not None:
            return cards_of(state.common.models, started)
        return [model_card(state, started), *(adapter_card(state, started, name) for name in state.adapters)]

    def card_of(name: str) -> dict[str, Any]:
        if state.common.models is not None:
            return card_named(name, state.common.models, started)
        if is_served(name, state):
            return model_card(state, started)
        if name not in state.adapters:
            raise unknown_model(name, (state.context.info.model_name, *state.adapters))
        return adapter_card(state, started, name)

    async def models(request: Request) -> Response:
        if is_from_anthropic_client(request):
            return JSONResponse(anthropic_page(all_cards(), request))
        return JSONResponse({"object": "list", "data": all_cards()})

    async def model(request: Request) -> Response:
        card = card_of(_given(request.path_params["name"]))
        return JSONResponse(anthropic_card(card) if is_from_anthropic_client(request) else card)

    headers = {"anthropic-version": "With it, the answer has the form of Anthropic's API."}
    about = Docs("OpenAI", "The models and their adapters.", headers=headers)
    about_one = about._replace(summary="One model.")
    return [
        *(Entry(f"{version}/models", models, access="user", docs=about) for version in ("/v1", "")),
        *(Entry(f"{version}/models/{{name:path}}", model, access="user", docs=about_one) for version in ("/v1", "")),
    ]


def _look_routes(state: ServerState) -> list[Entry]:
    async def status(_: Request) -> Response:
        fronts = {} if state.common.fronts is None else {"fronts": await state.common.fronts.report()}
        return JSONResponse(status_of(state) | fronts)

    async def live(request: Request) -> Response:
        from tureen.admin.live import live_report  # noqa: PLC0415 - for servers that somebody looks at

        return JSONResponse(await live_report(request, state))

    async def usage(request: Request) -> Response:
        from tureen.admin.live import usage_csv, usage_report  # noqa: PLC0415 - for servers that somebody looks at

        query = dict(request.query_params)
        refuse_unknown(query, UsageQuery.__struct_fields__)
        if convert(query, UsageQuery).format == "csv":
            headers = {"content-disposition": 'attachment; filename="usage.csv"'}
            return Response(await usage_csv(state.common), media_type="text/csv", headers=headers)
        return JSONResponse(await usage_report(state.common))

    about_usage = Docs("Server", "The usage of each client.", query=UsageQuery, other_answer="text/csv")
    about_live = Docs("Server", "The data of the /status page.", query=LiveQuery)
    return [
        Entry("/status", status, access="user", docs=Docs("Server", "The models and their states.")),
        Entry("/status/live", live, access="user", docs=about_live),
        Entry("/usage", usage, access="admin", docs=about_usage),
    ]


def _control_routes(state: ServerState) -> list[Entry]:
    async def load(request: Request) -> Response:
        return await _do(request, lambda models, name: models.load(name))

    async def unload(request: Request) -> Response:
        return await _do(request, lambda models, name: models.unload(name))

    async def pull(request: Request) -> Response:
        return await _do(request, lambda models, name: models.pull(name))

    async def _do(request: Request, act: Callable[[ServedModels, str], Awaitable[ServedModel]]) -> Response:
        body = await read_body(request, ModelNameBody)
        if state.common.models is None:
            raise InvalidRequest(
                "this server has one model, which is always loaded; start it with several: --model repeated",
                code="not_available",
            )
        return JSONResponse((await act(state.common.models, body.model)).report())

    def entry(path: str, endpoint: Callable[..., Any], summary: str) -> Entry:
        docs = Docs("Models", summary, bodies=(ModelNameBody,), example={"model": "SmolLM2-135M-Instruct"})
        return Entry(path, endpoint, access="admin", methods=["POST"], docs=docs)

    return [
        entry("/models/load", load, "Load a model, and answer when it is loaded."),
        entry("/models/unload", unload, "Unload a model that no request uses."),
        entry("/models/pull", pull, "Fetch a model's files, without loading it."),
    ]


def _adapter_routes(state: ServerState) -> list[Entry]:
    async def load(request: Request) -> Response:
        body = await read_body(request, LoadBody)
        _check_adapter_name(body.lora_name, state)
        return await _call("load_adapter", name=body.lora_name, path=body.lora_path)

    async def unload(request: Request) -> Response:
        body = await read_body(request, UnloadBody)
        return await _call("unload_adapter", name=body.lora_name)

    def failed(error: TureenError) -> Response:
        told = {"success": False, "error_message": error.message, "loaded_adapters": state.adapters}
        return error_answer(error, told | error_object(error))

    async def _call(op: str, **args: str) -> Response:
        loaded = await state.change_adapters(op, **args)
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded})

    return [
        Entry(
            "/load_lora_adapter",
            load,
            access="admin",
            methods=["POST"],
            render_error=failed,
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
            render_error=failed,
            docs=Docs("Adapters", "Unload one.", bodies=(UnloadBody,), example={"lora_name": "whisper"}),
        ),
    ]


def _vllm_adapter_routes(state: ServerState) -> list[Entry]:
    async def load(request: Request) -> Response:
        body = await read_body(request, VllmLoadBody)
        if body.is_3d_lora_weight:
            raise InvalidRequest(
                "is_3d_lora_weight is not available: adapters are read as peft writes them; leave it out",
                field="is_3d_lora_weight",
            )
        _check_adapter_name(body.lora_name, state)
        replaced = state.adapters.get(body.lora_name) if body.load_inplace else None
        if replaced is not None:
            await state.change_adapters("unload_adapter", name=body.lora_name)
        try:
            await state.change_adapters("load_adapter", name=body.lora_name, path=body.lora_path)
        except TureenError:  # then nothing has changed
            if replaced is not None:
                await state.change_adapters("load_adapter", name=body.lora_name, path=replaced)
            raise
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        body = await read_body(request, VllmUnloadBody)
        await state.change_adapters("unload_adapter", name=body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    name = {"lora_name": "whisper"}
    loading = Docs("Adapters", "Load one.", (VllmLoadBody,), name | {"lora_path": "examples/adapters/whisper"})
    unloading = Docs("Adapters", "Unload one.", (VllmUnloadBody,), name)
    return [
        Entry(
            "/v1/load_lora_adapter", load, access="admin", methods=["POST"], docs=loading._replace(answer="text/plain")
        ),
        Entry(
            "/v1/unload_lora_adapter",
            unload,
            access="admin",
            methods=["POST"],
            docs=unloading._replace(answer="text/plain"),
        ),
    ]


def _check_adapter_name(name: str, state: ServerState) -> None:
    """Raises InvalidRequest for the name of the model itself."""
    if name == state.context.info.model_name:
        raise InvalidRequest(f"lora_name {echo(name)} is the model's own name; choose another", field="lora_name")


def status_of(state: ServerState) -> dict[str, Any]:
    """Returns what the server says of its models."""
    if state.common.models is not None:
        return state.common.models.report()
    stats = state.client.stats
    model: dict[str, Any] = {
        "name": state.context.info.model_name,
        "status": "loaded",
        "engine": state.client.health.state,
        "num_running": stats.num_running,
        "num_waiting": stats.num_queued,
    }
    if stats.kv_disk is not None:
        model["kv_disk"] = msgspec.structs.asdict(stats.kv_disk)
    if state.client.replicas:
        model["replicas"] = [replica_report(replica) for replica in state.client.replicas]
    return {"models": [model]}


def cards_of(models: ServedModels, created: int) -> list[dict[str, Any]]:
    """Returns the entries of several models, each with its adapters, in `/v1/models`."""
    return [
        card | {"id": name, "root": name, "parent": parent}
        for member in models.members
        for card in [served_card(member, created)]
        for name, parent in [(member.name, None), *((adapter, member.name) for adapter in member.adapters)]
    ]


def card_named(name: str, models: ServedModels, created: int) -> dict[str, Any]:
    """Returns the entry of the model, or the adapter, of that name. Raises NotFound."""
    member = models.find(name)
    if member is None:
        raise unknown_model(name, models.names())
    card = served_card(member, created)
    return card | ({"id": name, "root": name, "parent": member.name} if name in member.adapters else {})


def served_card(member: ServedModel, created: int) -> dict[str, Any]:
    """Returns the entry of one of several models, which says whether it is loaded."""
    length = None if member.state is None else member.state.context.capacity
    return _card(member.name, created, length) | {"status": member.standing}


def model_card(state: ServerState, created: int) -> dict[str, Any]:
    """Returns the model's entry in OpenAI's `/v1/models`. `created`: seconds since the epoch."""
    return _card(state.context.info.model_name, created, state.context.capacity)


def _card(name: str, created: int, length: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tureen",
        "root": name,
        "parent": None,
        "max_model_len": length,
    }


def adapter_card(state: ServerState, created: int, name: str) -> dict[str, Any]:
    """Returns an adapter's entry in `/v1/models`; without its path, because every holder of a key may read it."""
    return model_card(state, created) | {"id": name, "root": name, "parent": state.context.info.model_name}
