"""Serves vLLM's routes by which a training loop pauses generation, exchanges adapters and asks for the ranks.

Source: https://docs.vllm.ai/en/latest/serving/online_serving (routes of the development mode, and LoRA adapters)
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tureen.contract.types import PauseMode
from tureen.control.admin import chosen_states
from tureen.control.model_routes import check_adapter_name
from tureen.control.pause import tell_unloaded
from tureen.errors import InvalidRequest, NotFound, TureenError, echo
from tureen.http.dialect import Docs, Entry, read_body, unless_gone
from tureen.requests.body import convert, refuse_unknown
from tureen.requests.state import ServerState

POLL_S = 0.02
MODES: dict[str, PauseMode] = {"abort": "abort", "keep": "in_place", "wait": "in_place"}

Flag = Literal["true", "false", "True", "False", "1", "0"]
Q = TypeVar("Q", bound=msgspec.Struct)


class PauseQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `POST /pause`."""

    mode: Annotated[
        Literal["abort", "wait", "keep"],
        Meta(description="Running requests end (abort), are waited for (wait), or go on after /resume (keep)."),
    ] = "abort"
    wait_for_inflight_requests: Annotated[Flag, Meta(description="true: as mode=wait, vLLM's older name.")] = "false"
    clear_cache: Annotated[Flag, Meta(description="Forget cached prefixes, unless mode is keep.")] = "true"
    model: Annotated[str | None, Meta(description="One of several models. Default: all.")] = None


class ResetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `POST /reset_prefix_cache`."""

    reset_running_requests: Annotated[
        Flag, Meta(description="true: running requests are computed again; else they must have ended.")
    ] = "false"
    reset_external: Annotated[Flag, Meta(description="Must be false: pages on the disk are kept.")] = "false"
    model: Annotated[str | None, Meta(description="One of several models. Default: all.")] = None


class WorldQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /get_world_size`."""

    include_dp: Annotated[Flag, Meta(description="false: of one replica.")] = "true"
    model: Annotated[str | None, Meta(description="One of several models. Default: the first.")] = None


class VllmLoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/load_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name that requests will use for the adapter.")]
    lora_path: Annotated[
        str, Meta(min_length=1, description="Folder on the server, as peft's save_pretrained writes it.")
    ]
    load_inplace: Annotated[bool, Meta(description="Replace the adapter that has this name.")] = False
    is_3d_lora_weight: Annotated[bool, Meta(description="Must be false: factors of experts are read as peft's.")] = (
        False
    )


class VllmUnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Meta(description="Name of the loaded adapter.")]
    lora_int_id: Annotated[int | None, Meta(description="vLLM's number of it; the name decides.")] = None


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""
    return [*_pause_routes(state), *_fact_routes(state), *_adapter_routes(state)]


def _pause_routes(state: ServerState) -> list[Entry]:
    async def pause(request: Request) -> Response:
        query = _query(request, PauseQuery)
        mode = "wait" if _is_true(query.wait_for_inflight_requests) else query.mode
        tell_unloaded(request, state, is_paused=True)
        for each in chosen_states(request, state):
            if mode == "wait":
                await unless_gone(request, _pause_when_idle(each))
            else:
                await each.client.call("pause", mode=MODES[mode])
            if mode != "keep" and _is_true(query.clear_cache):
                await each.client.call("flush_cache")
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        tell_unloaded(request, state, is_paused=False)
        for each in chosen_states(request, state):
            await each.client.call("resume")
        return JSONResponse({"status": "resumed"})

    async def reset(request: Request) -> Response:
        query = _query(request, ResetQuery)
        if _is_true(query.reset_external):
            raise InvalidRequest(
                "reset_external is not available: pages on the disk belong to the weights they were computed with; "
                "leave it out",
                field="reset_external",
            )
        for each in chosen_states(request, state):
            await _reset(each, with_running=_is_true(query.reset_running_requests))
        return Response()

    return [
        _entry("/pause", pause, "Hold generation up, as vLLM does.", "POST", PauseQuery),
        _entry("/resume", resume, "Let generation go on.", "POST"),
        _entry("/reset_prefix_cache", reset, "Forget cached prefixes.", "POST", ResetQuery),
    ]


def _fact_routes(state: ServerState) -> list[Entry]:
    async def is_paused(request: Request) -> Response:
        return JSONResponse({"is_paused": all(each.client.stats.is_paused for each in chosen_states(request, state))})

    async def world_size(request: Request) -> Response:
        config = state.context.config
        ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        replicas = max(1, len(state.client.replicas)) if _is_true(_query(request, WorldQuery).include_dp) else 1
        return JSONResponse({"world_size": ranks * replicas})

    return [
        _entry("/is_paused", is_paused, "Whether generation is held up.", "GET"),
        _entry("/get_world_size", world_size, "How many ranks compute the model.", "GET", WorldQuery),
    ]


def _entry(path: str, endpoint: Any, summary: str, method: str, query: type[msgspec.Struct] | None = None) -> Entry:
    return Entry(path, endpoint, access="admin", methods=[method], docs=Docs("Control", summary, query=query))


def _adapter_routes(state: ServerState) -> list[Entry]:
    async def load(request: Request) -> Response:
        body = await read_body(request, VllmLoadBody)
        if body.is_3d_lora_weight:
            raise InvalidRequest(
                "is_3d_lora_weight is not available: adapters are read as peft writes them; leave it out",
                field="is_3d_lora_weight",
            )
        check_adapter_name(body.lora_name, state)
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
        if body.lora_name not in state.adapters:
            raise NotFound(f"lora_name {echo(body.lora_name)}: no adapter of that name is loaded")
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


def _query(request: Request, kind: type[Q]) -> Q:
    """Read the query of a URL as `kind`. Raises InvalidRequest."""
    sent = dict(request.query_params)
    refuse_unknown(sent, kind.__struct_fields__)
    return convert(sent, kind)


def _is_true(flag: Flag) -> bool:
    return flag.lower() in ("true", "1")


async def _pause_when_idle(state: ServerState) -> None:
    """Let no request begin, wait until those that have begun have ended, and pause."""
    try:
        while await state.client.call("hold"):
            await asyncio.sleep(POLL_S)
        await state.client.call("pause", mode="in_place")
    finally:
        with contextlib.suppress(TureenError):  # an engine that has ended holds nothing
            await state.client.call("let_go")


async def _reset(state: ServerState, *, with_running: bool) -> None:
    """Forget cached prefixes. Raises InvalidRequest if requests run that are not to be computed again."""
    if not with_running:
        await state.client.call("flush_cache")
        return
    was_paused = state.client.stats.is_paused
    await state.client.call("pause", mode="retract")
    try:
        await state.client.call("flush_cache")
    finally:
        if not was_paused:
            await state.client.call("resume")
