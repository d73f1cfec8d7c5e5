"""The ASGI application: every dialect's routes, the gate in front, one way to answer errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from tureen.api import (
    adapter_routes,
    admin,
    anthropic,
    compat,
    generate,
    ollama,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    openapi,
    parsing_routes,
    pause,
    profile_routes,
    replay,
    score_routes,
    session_routes,
    sglang,
    tgi,
    tokenize_routes,
    weight_routes,
)
from tureen.api.call import call_of, rendered
from tureen.api.dialect import ClientGone, Dialect, Entry
from tureen.api.middleware import CLIENT_GONE_STATUS, Gate, Limiter
from tureen.api.reporter import report_forever
from tureen.api.state import ServerState, make_context
from tureen.config import Config
from tureen.engine.embedding import NO_TEXT
from tureen.errors import InvalidRequest, MethodNotAllowed, NotFound, RequestFailed, TureenError, echo
from tureen.log import get_logger
from tureen.media.loader import MediaLoader
from tureen.metrics import Metrics
from tureen.serving.client import EngineClient
from tureen.text.tokenizer import Tokenizer

DIALECTS: tuple[Dialect, ...] = (
    generate.routes,
    sglang.routes,
    tgi.routes,
    anthropic.routes,
    ollama.routes,
    openai_responses.routes,
    parsing_routes.routes,
    session_routes.routes,
    pause.routes,
    adapter_routes.routes,
    weight_routes.routes,
    profile_routes.routes,
    admin.routes,
    openai_chat.routes,
    openai_completions.routes,
    openai_embeddings.routes,
    score_routes.routes,
    tokenize_routes.routes,
    replay.routes,
    openapi.routes,
    compat.routes,
)
WITHOUT_TEXT: tuple[Dialect, ...] = (
    sglang.routes,
    openai_embeddings.routes,
    score_routes.routes,
    tokenize_routes.routes,
    parsing_routes.routes,
    admin.routes,
)
"""Where a model that makes embeddings works; users' other routes say what it is."""

log = get_logger("http")


def build_app(
    client: EngineClient, tokenizer: Tokenizer, config: Config, *, media: MediaLoader | None = None
) -> Starlette:
    """The application over a client that is ready. Its state is `app.state.server`. media: None for text models."""
    context = make_context(tokenizer, client.info, config, media)
    state = ServerState(client, context, Metrics(client.info.model_name), media)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        reporter = asyncio.create_task(report_forever(state))
        yield
        reporter.cancel()
        await state.close()

    app = Starlette(
        routes=[route for dialect in DIALECTS for route in _entries(dialect, state)],
        middleware=[Middleware(Gate, state=state), Middleware(replay.Replay, state=state), Middleware(Limiter)],
        exception_handlers={
            TureenError: _tureen_error,
            RecursionError: _too_deep,
            HTTPException: _http_exception,
            ClientGone: _client_gone,
            ClientDisconnect: _client_gone,
            Exception: _unexpected,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _entries(dialect: Dialect, state: ServerState) -> list[Entry]:
    if state.context.info.pooling is None or dialect in WITHOUT_TEXT:
        return dialect(state)
    return [
        _without_text(entry) if entry.access == "user" and "POST" in (entry.methods or ()) else entry
        for entry in dialect(state)
    ]


def _without_text(entry: Entry) -> Entry:
    """A route for work, where the model does not do it."""

    async def refuse(_: Request) -> Response:
        raise InvalidRequest(NO_TEXT, code="not_a_generation_model")

    return Entry(
        entry.path, refuse, access=entry.access, methods=sorted(entry.methods or ()), render_error=entry.render_error
    )


async def _tureen_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TureenError)
    return rendered(error, request.scope)


async def _too_deep(request: Request, _: Exception) -> Response:
    """A body that could just be read, by what looks at it from deeper inside."""
    return rendered(InvalidRequest("the body is nested too deeply", code="invalid_json"), request.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in found for method in route.methods}))
        response = rendered(MethodNotAllowed(f"{request.method} is not for this path; use {allowed}"), request.scope)
        response.headers["allow"] = allowed
        return response
    unknown = NotFound(f"there is nothing at {echo(request.scope['path'])}", code="unknown_route")
    return rendered(unknown, request.scope)


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def _unexpected(request: Request, error: Exception) -> Response:
    """The server logs the traceback: Starlette raises the exception again."""
    log.error("%s failed: %s", call_of(request.scope).request_id, type(error).__name__)
    return rendered(RequestFailed("an internal error ended this request; the server goes on"), request.scope)
