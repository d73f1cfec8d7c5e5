"""Around every request: its id, host check, API key, body limit, access log. Decisions use the raw path."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tureen.api.errors import error_response
from tureen.api.state import ServerState
from tureen.config import Config
from tureen.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, TureenError, Unauthorized, echo
from tureen.log import RateLimit, get_logger

OPEN_PATHS = ("/health", "/health_generate", "/metrics")
"""Answered without an API key: what load balancers and monitors ask for."""

QUIET_PATHS = ("/health", "/metrics")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BODY_TIMEOUT_S = 30.0

log = get_logger("http")


class Gate:
    """Lets a request through to the app, or answers it with an error. Logs it either way, never its content."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._config = state.context.config
        self._metrics = state.metrics
        self._bad_requests = RateLimit(count=20, interval_s=1.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:12]
        scope["request_id"] = request_id
        started_s, status = time.monotonic(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            check(scope, self._config)
            await self._app(scope, limited(receive, scope, self._config.max_body_bytes), send_noting)
        except TureenError as error:
            await error_response(error)(scope, receive, send_noting)
        finally:
            self._note(scope, request_id, status, time.monotonic() - started_s)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        self._metrics.count_response(status or 499)
        if scope["path"] in QUIET_PATHS:
            return
        left_out = self._bad_requests.admit() if 400 <= status < 500 else 0
        if left_out is not None:
            more = f" ({left_out} like it left out)" if left_out else ""
            path = scope["path"][:80] if scope["path"].isprintable() else "?"
            shown = status or "client gone"
            log.info("%s %s %s %s %.0f ms%s", request_id, scope["method"], path, shown, seconds * 1e3, more)


def check(scope: Scope, config: Config) -> None:
    """Host and API key. Raises InvalidRequest, Unauthorized."""
    headers = dict(scope["headers"])
    host = _host_name(headers.get(b"host", b"").decode("latin-1"))
    if config.host in LOOPBACK and host not in LOOPBACK:
        raise InvalidRequest(
            f"the Host header says {echo(host)}, but this server is for 127.0.0.1 and localhost only; "
            "start it with --host to be reached by another name",
            field="Host",
            code="invalid_host",
        )
    if config.api_key is not None and scope["path"] not in OPEN_PATHS:
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + config.api_key.encode()):
            raise Unauthorized("this server needs an API key; send the header 'Authorization: Bearer KEY'")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rsplit(":", 1)[0].lower() if host.count(":") == 1 else host.lower()


def limited(receive: Receive, scope: Scope, max_bytes: int) -> Receive:
    """`receive` that raises PayloadTooLarge as soon as the body passes the limit, RequestTimeout when it stalls."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    num_bytes, is_complete = 0, False
    too_large = PayloadTooLarge(
        f"the body is larger than {max_bytes} bytes; send less, or start the server with a larger --max-body-bytes"
    )

    async def receive_limited() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await receive()
        if declared.isdigit() and int(declared[:18]) > max_bytes:
            raise too_large
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
        num_bytes += len(message.get("body", b""))
        is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        if num_bytes > max_bytes:
            raise too_large
        return message

    return receive_limited
