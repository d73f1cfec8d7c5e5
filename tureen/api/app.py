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

from tureen.api import adapter_routes, admin, generate, pause, session_routes, sglang, tgi
from tureen.api.dialect import ClientGone, Dialect
from tureen.api.errors import error_response
from tureen.api.middleware import Gate
from tureen.api.reporter import report_forever
from tureen.api.state import ServerState, make_context
from tureen.config import Config
from tureen.errors import MethodNotAllowed, NotFound, RequestFailed, TureenError, echo
from tureen.log import get_logger
from tureen.media.loader import MediaLoader
from tureen.metrics import Metrics
from tureen.serving.client import EngineClient
from tureen.text.tokenizer import Tokenizer

CLIENT_GONE_STATUS = 499
DIALECTS: tuple[Dialect, ...] = (
    generate.routes,
    sglang.routes,
    tgi.routes,
    session_routes.routes,
    pause.routes,
    adapter_routes.routes,
    admin.routes,
)

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
        routes=[route for dialect in DIALECTS for route in dialect(state)],
        middleware=[Middleware(Gate, state=state)],
        exception_handlers={
            TureenError: _tureen_error,
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


async def _tureen_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TureenError)
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = error_response(MethodNotAllowed(f"{request.method} is not for this path; use {allowed}"))
        response.headers["allow"] = allowed
        return response
    return error_response(NotFound(f"there is nothing at {echo(request.scope['path'])}", code="unknown_route"))


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def _unexpected(request: Request, error: Exception) -> Response:
    """The server logs the traceback: Starlette raises the exception again."""
    log.error("%s failed: %s", request.scope.get("request_id"), type(error).__name__)
    return error_response(RequestFailed("an internal error ended this request; the server goes on"))
