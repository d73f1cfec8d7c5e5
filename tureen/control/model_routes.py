"""Serves `/status`, and what loads and unloads models where a server has several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest
from tureen.http.dialect import Docs, Entry, read_body
from tureen.requests.served_models import ServedModel, ServedModels
from tureen.requests.state import ServerState


class ModelNameBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /models/load`, `/models/unload` and `/models/pull`."""

    model: Annotated[str, Meta(min_length=1, description="Name of one of the server's models.")]


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def status(_: Request) -> Response:
        return JSONResponse(status_of(state))

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
        Entry("/status", status, access="user", docs=Docs("Server", "Which models there are, and what they do.")),
        entry("/models/load", load, "Load a model, and answer when it is loaded."),
        entry("/models/unload", unload, "Unload a model that no request uses."),
        entry("/models/pull", pull, "Fetch a model's files, without loading it."),
    ]


def status_of(state: ServerState) -> dict[str, Any]:
    """Returns what the server says of its models."""
    if state.common.models is not None:
        return state.common.models.report()
    stats = state.client.stats
    model = {
        "name": state.context.info.model_name,
        "status": "loaded",
        "engine": state.client.health.state,
        "num_running": stats.num_running,
        "num_waiting": stats.num_queued,
    }
    return {"models": [model]}
