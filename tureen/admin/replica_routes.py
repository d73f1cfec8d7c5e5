"""Tells of the engines of a server that has several, and drains and restarts them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest
from tureen.http.dialect import Docs, Entry, read_body
from tureen.metrics import Metrics
from tureen.requests.state import ServerState
from tureen.serving.client import ReplicaView


class ReplicaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /replicas/drain`, `/replicas/undrain` and `/replicas/restart`."""

    replica: Annotated[int, Meta(ge=0, description="Its number in /status.")]


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes; none where there is one engine."""
    replicas = state.client.replicas
    if not replicas:
        return []

    async def chosen(request: Request) -> ReplicaView:
        body = await read_body(request, ReplicaBody)
        if body.replica >= len(replicas):
            raise InvalidRequest(f"replica must be at most {len(replicas) - 1}, got {body.replica}", field="replica")
        return replicas[body.replica]

    async def drain(request: Request) -> Response:
        replica = await chosen(request)
        replica.drain(is_drained=True)
        return JSONResponse(replica_report(replica))

    async def undrain(request: Request) -> Response:
        replica = await chosen(request)
        replica.drain(is_drained=False)
        return JSONResponse(replica_report(replica))

    async def restart(request: Request) -> Response:
        replica = await chosen(request)
        await replica.restart()
        return JSONResponse(replica_report(replica))

    handlers = {
        "drain": (drain, "Drain a replica: it gets no new requests, and its own continue in other replicas."),
        "undrain": (undrain, "Undrain a replica: it gets requests again."),
        "restart": (restart, "Restart a replica, and answer when it is ready."),
    }
    return [
        Entry(
            f"/replicas/{verb}",
            handler,
            access="admin",
            methods=["POST"],
            docs=Docs("Control", about, bodies=(ReplicaBody,), example={"replica": 0}),
        )
        for verb, (handler, about) in handlers.items()
    ]


def replica_report(replica: ReplicaView) -> dict[str, Any]:
    """Returns what `/status` says of one replica."""
    stats, health = replica.stats, replica.health
    return {
        "replica": replica.number,
        "engine": health.state,
        "reason": health.reason,
        "role": replica.role,
        "drained": replica.is_drained,
        "num_running": stats.num_running,
        "num_waiting": stats.num_queued,
        "queued_tokens": replica.total_load,
        "prompt_tokens": stats.total_prompt_tokens,
        "cached_tokens": stats.total_cached_tokens,
        "num_replacements": health.num_replacements,
    }


def gauge_replica(replica: ReplicaView, metrics: Metrics) -> None:
    """Copies the figures of one replica into the metrics."""
    stats, health = replica.stats, replica.health
    values: dict[str, float] = {
        "replica_up": health.state == "healthy",
        "replica_running_reqs": stats.num_running,
        "replica_queue_reqs": stats.num_queued,
        "replica_queued_tokens": replica.total_load,
        "replica_replacements": health.num_replacements,
    }
    for name, value in values.items():
        metrics.set_of_replica(name, replica.number, value)
