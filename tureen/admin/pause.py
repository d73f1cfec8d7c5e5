"""Serves SGLang's `/pause_generation` and `/continue_generation`."""

from __future__ import annotations

from typing import Annotated, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.admin.server_routes import chosen_states
from tureen.contract.types import PauseMode
from tureen.http.dialect import Docs, Entry, read_body
from tureen.requests.state import ServerState


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /pause_generation`."""

    mode: Annotated[
        PauseMode,
        Meta(description="Running requests are aborted (abort), recomputed later (retract), or paused (in_place)."),
    ] = "abort"


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def pause_generation(request: Request) -> Response:
        body = await read_body(request, PauseBody)
        num_requests = 0
        tell_unloaded(request, state, is_paused=True)
        for each in chosen_states(request, state):
            num_requests += cast(int, await each.client.call("pause", mode=body.mode))
        done = {"abort": "aborted", "retract": "waiting to be computed again", "in_place": "paused in place"}
        return JSONResponse({"message": f"paused; {num_requests} requests {done[body.mode]}", "status": "ok"})

    async def continue_generation(request: Request) -> Response:
        tell_unloaded(request, state, is_paused=False)
        for each in chosen_states(request, state):
            await each.client.call("resume")
        return JSONResponse({"message": "generation resumed", "status": "ok"})

    return [
        Entry(
            "/pause_generation",
            pause_generation,
            access="admin",
            methods=["POST"],
            docs=Docs("Control", "Pause generation.", bodies=(PauseBody,), example={"mode": "in_place"}),
        ),
        Entry(
            "/continue_generation",
            continue_generation,
            access="admin",
            methods=["POST"],
            docs=Docs("Control", "Resume generation."),
        ),
    ]


def tell_unloaded(request: Request, state: ServerState, *, is_paused: bool) -> None:
    """Has models that are not loaded do the same when they are, where the operation is for all."""
    if state.common.models is not None and "model" not in request.query_params:
        state.common.models.pause_later(is_paused=is_paused)
