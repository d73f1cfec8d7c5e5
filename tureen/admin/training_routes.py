"""Serves vLLM's routes by which a training loop pauses generation, forgets prefixes and asks for the ranks.

Source: https://docs.vllm.ai/en/latest/serving/online_serving (routes of the development mode)
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.admin.pause import tell_unloaded
from tureen.admin.server_routes import chosen_states, num_ranks
from tureen.contract.types import PauseMode
from tureen.errors import InvalidRequest, TureenError
from tureen.fields.body import convert, read_json, refuse_unknown
from tureen.http.dialect import Docs, Entry, unless_gone
from tureen.requests.state import ServerState

POLL_S = 0.02
MODES: dict[str, PauseMode] = {"abort": "abort", "keep": "in_place", "wait": "in_place"}

SKYRL_NAMES = {"wait_for_inflight_request": "wait_for_inflight_requests"}
"""Names of options in SkyRL's bodies -> vLLM's."""

Flag = Literal["true", "false", "True", "False", "1", "0"]
Q = TypeVar("Q", bound=msgspec.Struct)


class PauseQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `POST /pause`."""

    mode: Annotated[
        Literal["abort", "wait", "keep"],
        Meta(description="Running requests are aborted (abort), finish first (wait), or resume later (keep)."),
    ] = "abort"
    wait_for_inflight_requests: Annotated[Flag, Meta(description="true: as mode=wait, vLLM's older name.")] = "false"
    clear_cache: Annotated[Flag, Meta(description="Forget cached prefixes, unless mode is keep.")] = "true"
    model: Annotated[str | None, Meta(description="One of several models. Default: all.")] = None


class ResetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `POST /reset_prefix_cache`."""

    reset_running_requests: Annotated[
        Flag, Meta(description="true: running requests are recomputed; otherwise they must have finished.")
    ] = "false"
    reset_external: Annotated[Flag, Meta(description="Must be false: pages on the disk are kept.")] = "false"
    model: Annotated[str | None, Meta(description="One of several models. Default: all.")] = None


class WorldQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /get_world_size`."""

    include_dp: Annotated[Flag, Meta(description="false: of one replica.")] = "true"
    model: Annotated[str | None, Meta(description="One of several models. Default: the first.")] = None


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""
    return [*_pause_routes(state), *_fact_routes(state)]


def _pause_routes(state: ServerState) -> list[Entry]:
    async def pause(request: Request) -> Response:
        query = await _read_options(request, PauseQuery)
        mode = "wait" if is_true(query.wait_for_inflight_requests) else query.mode
        tell_unloaded(request, state, is_paused=True)
        for each in chosen_states(request, state):
            if mode == "wait":
                await unless_gone(request, _pause_when_idle(each))
            else:
                await each.client.call("pause", mode=MODES[mode])
            if mode != "keep" and is_true(query.clear_cache):
                await each.client.call("flush_cache")
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        tell_unloaded(request, state, is_paused=False)
        for each in chosen_states(request, state):
            await each.client.call("resume")
        return JSONResponse({"status": "resumed"})

    async def reset(request: Request) -> Response:
        query = await _read_options(request, ResetQuery)
        if is_true(query.reset_external):
            raise InvalidRequest(
                "reset_external is not available: pages on the disk belong to the weights they were computed with; "
                "leave it out",
                field="reset_external",
            )
        for each in chosen_states(request, state):
            await _reset(each, with_running=is_true(query.reset_running_requests))
        return Response(media_type="text/plain")

    forget = Docs("Control", "Forget cached prefixes.", query=ResetQuery, answer="text/plain")
    return [
        _entry("/pause", pause, "Pause generation, as vLLM does.", "POST", PauseQuery),
        _entry("/resume", resume, "Resume generation.", "POST"),
        Entry("/reset_prefix_cache", reset, access="admin", methods=["POST"], docs=forget),
    ]


def _fact_routes(state: ServerState) -> list[Entry]:
    async def is_paused(request: Request) -> Response:
        return JSONResponse({"is_paused": all(each.client.stats.is_paused for each in chosen_states(request, state))})

    async def world_size(request: Request) -> Response:
        with_replicas = is_true(read_query(request, WorldQuery).include_dp)
        return JSONResponse({"world_size": num_ranks(state, with_replicas=with_replicas)})

    return [
        _entry("/is_paused", is_paused, "Whether generation is paused.", "GET"),
        _entry("/get_world_size", world_size, "How many ranks compute the model.", "GET", WorldQuery),
    ]


def _entry(path: str, endpoint: Any, summary: str, method: str, query: type[msgspec.Struct] | None = None) -> Entry:
    return Entry(path, endpoint, access="admin", methods=[method], docs=Docs("Control", summary, query=query))


def read_query(request: Request, kind: type[Q]) -> Q:
    """Read the query of a URL as `kind`. Raises InvalidRequest."""
    sent = dict(request.query_params)
    refuse_unknown(sent, kind.__struct_fields__)
    return convert(sent, kind)


async def _read_options(request: Request, kind: type[Q]) -> Q:
    """Read options from the query of a URL and from a JSON body, in which SkyRL's client has them. Raise
    InvalidRequest."""
    raw = await request.body()
    body = read_json(request.headers.get("content-type"), raw) if raw.strip() else {}
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in body.items()}
    sent = {SKYRL_NAMES.get(name, name): value for name, value in (texts | dict(request.query_params)).items()}
    refuse_unknown(sent, kind.__struct_fields__)
    return convert(sent, kind)


def is_true(flag: Flag) -> bool:
    """Return whether a flag of a query is set."""
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
