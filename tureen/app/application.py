"""Builds the ASGI application: the routes of all dialects and our own, middleware, and the handlers of errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tureen.admin import (
    expert_routes,
    logging_routes,
    model_routes,
    parsing_routes,
    pause,
    profile_routes,
    replica_routes,
    server_routes,
    session_routes,
    training_routes,
    weight_routes,
)
from tureen.admin.reporter import report_forever, sample_forever
from tureen.app import compat, generate, openapi, page, playground, unknown_routes
from tureen.app.shared_paths import share
from tureen.config import Config
from tureen.config_facts import asks_for_traces
from tureen.errors import InvalidRequest, MethodNotAllowed, RequestFailed, TureenError, UpgradeRefused
from tureen.http import replay
from tureen.http.call import call_of, error_response_for
from tureen.http.dialect import ClientGone, Entry, Routes, dialects
from tureen.http.middleware import CLIENT_GONE_STATUS, Gate, Limiter, find_route, without_slashes
from tureen.http.origins import cors
from tureen.log import get_logger
from tureen.media.loader import MediaLoader
from tureen.metrics import Metrics
from tureen.requests.model_field import check_kind
from tureen.requests.state import ServerState, make_context
from tureen.serving.client import EngineClient
from tureen.text.tokenizer import Tokenizer

OUR_ROUTES: tuple[Routes, ...] = (
    parsing_routes.routes,
    session_routes.routes,
    pause.routes,
    training_routes.routes,
    weight_routes.routes,
    page.routes,
    model_routes.routes,
    profile_routes.routes,
    expert_routes.routes,
    replica_routes.routes,
    logging_routes.routes,
    server_routes.routes,
    replay.routes,
    openapi.routes,
    compat.routes,
)

log = get_logger("http")


def fitting(state: ServerState, entries: list[Entry]) -> list[Entry]:
    """Returns the routes of all APIs that fit a model. An embedding model gets routes that refuse to generate."""
    if state.context.info.kind == "generator":
        return entries
    return [_without_text(entry, state) if _needs_text(entry) else entry for entry in entries]


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: Config,
    *,
    media: MediaLoader | None = None,
    arrange: Callable[[ServerState, list[Entry]], list[Entry]] = fitting,
) -> Starlette:
    """Builds the application for an engine client that is ready. Its ServerState is `app.state.server`.

    `media`: None for models that accept only text. `arrange`: turns the routes of all APIs into those of the
    application. Raises StartupError for settings that do not fit the model.
    """
    state = _make_state(client, tokenizer, config, media)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(report_forever(state.common, config.log_interval_s)),
            asyncio.create_task(sample_forever(state.common)),
        ]
        state.lifecycle.start()
        yield
        for task in tasks:
            task.cancel()
        await state.common.close()

    app = Starlette(
        routes=arrange(state, all_routes(state)),
        middleware=[
            *cors(config.allowed_origins),
            *_traces(config, state),
            Middleware(Gate, state=state),
            Middleware(replay.Replay, state=state),
            Middleware(Limiter, unknown_fields=config.unknown_fields),
        ],
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


def _make_state(client: EngineClient, tokenizer: Tokenizer, config: Config, media: MediaLoader | None) -> ServerState:
    """Raises StartupError."""
    context = make_context(tokenizer, client.info, config, media)
    state = ServerState(client, context, Metrics(client.info.model_name), media)
    if config.sessions_db is not None:
        keeping = importlib.import_module("tureen.requests.session_keeping")  # imports SQLite
        state.lifecycle.services.append(keeping.SessionKeeper(state))
    return state


def _traces(config: Config, state: ServerState) -> list[Middleware]:
    if not asks_for_traces(config):
        return []
    from tureen.http.tracing import traces  # noqa: PLC0415 - few servers need it

    return traces(config, state.lifecycle)


def all_routes(state: ServerState) -> list[Entry]:
    """Returns the routes of all APIs for one model."""
    groups = (generate.routes, playground.routes, *(dialect.routes for dialect in dialects()), *OUR_ROUTES)
    return share([entry for routes in groups for entry in routes(state)])


def _needs_text(entry: Entry) -> bool:
    return entry.access == "user" and "POST" in (entry.methods or ()) and not entry.any_model


def _without_text(entry: Entry, state: ServerState) -> Entry:
    """Replaces a route that generates text with one that refuses, because the model generates no text."""

    async def refuse(_: Request) -> Response:
        check_kind(state.context.info, "generator")
        raise AssertionError(entry.path)

    return Entry(
        entry.path, refuse, access=entry.access, methods=sorted(entry.methods or ()), render_error=entry.render_error
    )


async def _tureen_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TureenError)
    return error_response_for(error, request.scope)


async def _too_deep(request: Request, _: Exception) -> Response:
    """Answers a body that is nested too deeply for code after the JSON decoder, which has its own limit."""
    return error_response_for(InvalidRequest("the body is nested too deeply", code="invalid_json"), request.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Answers Starlette's errors: an unknown route, or a method that the route does not have."""
    assert isinstance(error, HTTPException)
    shorter = without_slashes(request.scope)
    if error.status_code == 404 and shorter is not None and find_route(shorter) is not None:
        query = f"?{request.url.query}" if request.url.query else ""  # redirects as FastAPI's servers do
        return Response(status_code=307, headers={"location": quote(shorter["path"]) + query})
    answer = unknown_routes.error_for(request.scope, request.app.routes, error.status_code)
    response = error_response_for(answer, request.scope)
    if isinstance(answer, MethodNotAllowed):
        response.headers["allow"] = answer.allowed
    elif isinstance(answer, UpgradeRefused):
        response.headers["upgrade"] = "HTTP/1.1"
    return response


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answers an unexpected exception. The traceback is logged by uvicorn, because Starlette raises it again."""
    log.error("%s failed: %s", call_of(request.scope).request_id, type(error).__name__)
    return error_response_for(RequestFailed("an internal error ended this request; the server runs on"), request.scope)
