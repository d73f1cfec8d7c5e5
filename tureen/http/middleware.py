"""Wraps every request: id, host check, access, quota, body limit, access log. Decides all of it before reading a
body."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tureen.clients.keys import NO_LIMITS, SCHEME, Key, Keys
from tureen.clients.quotas import Account, ClientWork, serving
from tureen.errors import Forbidden, InvalidRequest, PayloadTooLarge, RequestTimeout, TureenError, echo
from tureen.fields import ignored
from tureen.fields.ignored import UnknownFields
from tureen.http.awake import AwakeTimer
from tureen.http.call import ClientCall, call_of, error_response_for
from tureen.http.dialect import Entry, RenderError, dialects
from tureen.http.errors import error_response
from tureen.http.head import host_name
from tureen.http.listener import LOOPBACK, UNIX
from tureen.http.origins import Hosts, is_allowed
from tureen.log import RateLimit, get_logger
from tureen.requests.state import ServerState

QUIET_PATHS = ("/health", "/metrics", "/status/live")
FORWARDING = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
"""Headers that mark a request as forwarded by a proxy."""

BODY_GRACE_S = 30.0
"""Seconds after which a body must arrive at MIN_BODY_RATE or faster."""
MIN_BODY_RATE = 16 << 10
"""Bytes a second that a client must send after BODY_GRACE_S. The server's own time does not count."""
MAX_BODY_S = 600.0
IGNORED_HEADER, STRICT_HEADER = b"x-tureen-ignored", b"x-tureen-strict"
REQUEST_ID_HEADERS = (b"x-request-id", b"request-id")
"""Headers with the id of the request: OpenAI's clients read the first, Anthropic's the second."""

CLIENT_GONE_STATUS = 499
"""Status in log and metrics of a request whose client has left, as in nginx."""

log = get_logger("http")


class Gate:
    """ASGI middleware that passes a request to the app or answers it with an error, and logs it without its content."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._config = state.context.config
        self._hosts = Hosts(self._config)
        self._bad_requests = RateLimit(count=20, interval_s=1.0)
        self._forms = [form for dialect in dialects() for form in dialect.errors_below.items()]
        self._client_forms = [
            (start, name.encode(), form)
            for dialect in dialects()
            for (start, name), form in dialect.errors_with.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = call_of(scope)
        call.request_id = call.request_id or uuid.uuid4().hex[:12]
        call.send_part = send
        started_s, status = time.monotonic(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [] if call.work is None else call.work.account.headers()
                ids = [(name, call.request_id.encode()) for name in REQUEST_ID_HEADERS]
                headers = [*message.get("headers", ()), *ids, *extra]
                message = {**message, "headers": headers}
            await send(message)

        try:
            route = find_route(scope)
            call.render_error = self._form(scope, route)
            check_access(call, scope, route, self._state.common.keys, self._hosts, self._config.allowed_origins)
            with self._visit(call, scope, route) as account:
                if account is not None:
                    call.work = ClientWork(account)
                    call.work.trace = call.trace
                max_bytes = getattr(route, "max_body_bytes", None) or self._config.max_body_bytes
                await self._app(scope, limited(receive, scope, max_bytes), send_noting)
        except TureenError as error:
            await error_response_for(error, scope)(scope, receive, send_noting)
        except Exception:  # an edge: the outer middleware answers it, and no client has left
            status = status or 500
            raise
        finally:
            self._note(call, scope, status, time.monotonic() - started_s)

    def _form(self, scope: Scope, route: BaseRoute | None) -> RenderError:
        """Returns the function that writes errors: of the route's API, or else of the client's."""
        form: RenderError = error_response
        if isinstance(route, Entry):
            form = route.render_error
        elif route is None:
            form = next((form for start, form in self._forms if scope["path"].startswith(start)), form)
        if form is not error_response:
            return form
        sent = [name for name, _ in scope["headers"]]
        fitting = (own for start, name, own in self._client_forms if scope["path"].startswith(start) and name in sent)
        return next(fitting, form)

    def _visit(
        self, call: ClientCall, scope: Scope, route: BaseRoute | None
    ) -> contextlib.AbstractContextManager[Account] | contextlib.nullcontext[None]:
        """Opens the account that a request is charged to; none for routes that are not limited."""
        if not isinstance(route, Entry) or not route.is_limited:
            return contextlib.nullcontext()
        return self._state.quotas.visit(call.client_id(scope), call.limits)

    def _note(self, call: ClientCall, scope: Scope, status: int, seconds: float) -> None:
        if call.is_elsewhere:
            return  # it is noted there
        is_gone = not call.refusal_status and (call.has_client_left or status in (0, CLIENT_GONE_STATUS))
        status = call.refusal_status or status
        figures = {"figures": _figures(call, status, seconds)}
        metrics = (call.answered_by or self._state).metrics
        metrics.count_response(CLIENT_GONE_STATUS if is_gone else status)
        for label in call.telling.labels:
            metrics.count_ignored(label)
        if scope["path"] in QUIET_PATHS:
            return
        left_out = self._bad_requests.admit() if 400 <= status < 500 and not is_gone else 0
        if left_out is not None:
            suffix = f" ({left_out} like it left out)" if left_out else ""
            path = scope["path"][:80] if scope["path"].isprintable() else "?"
            by_client = f" by {call.client_name}" if call.client_name else ""
            shown = f"client gone after {call.num_tokens} tokens," if is_gone else status
            method, elapsed_ms = scope["method"], seconds * 1e3
            text = "%s %s %s %s %.0f ms%s%s"
            log.info(text, call.request_id, method, path, shown, elapsed_ms, by_client, suffix, extra=figures)


def _figures(call: ClientCall, status: int, seconds: float) -> dict[str, Any]:
    """Returns the fields of a request's entry in a JSON log."""
    figures: dict[str, Any] = {
        "request_id": call.request_id,
        "status": status,
        "duration_ms": round(seconds * 1e3, 3),
        "client": call.client_name or None,
        "trace_id": None if call.trace is None else call.trace.trace_id,
    }
    work = call.work
    if work is not None and work.num_tokens and work.first_token_s is not None:
        figures |= {
            "prompt_tokens": work.prompt_tokens,
            "cached_tokens": work.cached_tokens,
            "output_tokens": work.num_tokens,
            "ttft_ms": round(work.first_token_s * 1e3, 3),
            "tokens_per_s": round(work.num_tokens / max(seconds, 1e-9), 3),
        }
    return {name: value for name, value in figures.items() if value is not None}


class Limiter:
    """ASGI middleware that raises TooManyRequests for a client with too many running requests, makes the request's
    work the current one (clients/quotas.py), and lists ignored fields in the answer's head (fields/ignored.py)."""

    def __init__(self, app: ASGIApp, unknown_fields: UnknownFields | None) -> None:
        self._app = app
        self._unknown_fields = unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope) if scope["type"] == "http" else None
        if call is None or call.work is None:
            await self._app(scope, receive, send)
            return
        told, work = call.telling, call.work
        told.unknown_fields = self._unknown_fields
        told.is_strict = STRICT_HEADER in dict(scope["headers"]) and is_strict(scope)

        async def send_telling(message: Message) -> None:
            if message["type"] == "http.response.start" and told.paths:
                headers = [*message.get("headers", ()), (IGNORED_HEADER, told.header())]
                message = {**message, "headers": headers}
            await send(message)

        token = ignored.current.set(told)
        try:
            with work.account.running(), serving(work):
                await self._app(scope, receive, send_telling)
        finally:
            ignored.current.reset(token)


def is_strict(scope: Scope) -> bool:
    """Returns whether the client asks that fields without effect be refused. Raises InvalidRequest."""
    value = _header(scope, STRICT_HEADER)
    if value not in ("", "0", "1"):
        raise InvalidRequest(
            f"x-tureen-strict must be 1, which refuses fields without effect, or 0, got {echo(value)}",
            field="x-tureen-strict",
        )
    return value == "1"


def find_route(scope: Scope) -> BaseRoute | None:
    """Returns the route that will answer, matched as Starlette's router does: by path and method, else by path, else by
    the path without its trailing slashes, to which the answer redirects; None = no route has this path."""
    by_path = None
    for route in scope["app"].routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return cast(BaseRoute, route)
        if match is Match.PARTIAL and by_path is None:
            by_path = route
    if by_path is None and (shorter := without_slashes(scope)) is not None:
        return find_route(shorter)
    return by_path


def without_slashes(scope: Scope) -> Scope | None:
    """Returns the scope with the trailing slashes of its path removed; None if the path has none or consists of
    them."""
    path = scope["path"].rstrip("/")
    return None if not path or path == scope["path"] else {**scope, "path": path}


def check_access(
    call: ClientCall, scope: Scope, route: BaseRoute | None, keys: Keys, hosts: Hosts, origins: Sequence[str] = ()
) -> None:
    """Raises Unauthorized or Forbidden unless the client may call `route`; None = no route has this path. `origins`:
    sites whose pages may call routes that need no key.

    Stores the client's name, limits and admin rights, which its key defines, in the call.
    """
    is_local = _is_local(scope)
    presented = authorization(scope)
    key = keys.find(presented)
    call.client_name = (key.name if key is not None else "") or call.client_name
    call.limits = NO_LIMITS if key is None else key.limits
    call.admin_refusal = keys.admin_refusal(key, presented, is_local=is_local)
    access = "user" if route is None else getattr(route, "access", None)
    other_name = None if key is not None else hosts.refusal(_header(scope, b"host"))
    refusal: TureenError | None
    if access == "open":
        refusal = other_name if hosts.is_for_this_machine else None
    elif access == "user":
        refusal = keys.user_refusal(key, presented) or other_name or _page_refusal(scope, route, key, origins)
    elif access == "admin":
        refusal = call.admin_refusal or other_name or _page_refusal(scope, route, key, origins)
    else:
        refusal = Forbidden("this path is closed: its access level is not declared", code="closed_route")
    if refusal is not None:
        raise refusal


def authorization(scope: Scope) -> bytes:
    """Returns the Authorization header, or one made from Anthropic's header x-api-key."""
    authorization, api_key = _header(scope, b"authorization"), _header(scope, b"x-api-key")
    return authorization.encode("latin-1") or (SCHEME + api_key.encode("latin-1") if api_key else b"")


def _is_of_other_page(scope: Scope) -> bool:
    """Returns whether a browser sent the request for a page of another site (Fetch standard: `Origin`; Fetch Metadata:
    `Sec-Fetch-Site`)."""
    site, origin = _header(scope, b"sec-fetch-site"), _header(scope, b"origin")
    is_other_host = bool(origin) and origin.partition("://")[2].lower() != _header(scope, b"host").lower()
    return is_other_host or site not in ("", "same-origin", "none")


def _page_refusal(scope: Scope, route: BaseRoute | None, key: Key | None, origins: Sequence[str]) -> TureenError | None:
    """Refuses requests that a browser sends without a key: those of another site's page without a CORS preflight, and
    navigations (Fetch Metadata: `Sec-Fetch-Mode`) to routes that act.

    A route acts if it accepts POST as well as GET. A JSON body needs a preflight, which only pages of allowed origins
    get (origins.py).
    """
    if key is not None:
        return None
    is_other = _is_of_other_page(scope) and not is_allowed(_header(scope, b"origin"), origins)
    if scope["method"] in ("GET", "HEAD"):
        acts = "POST" in (getattr(route, "methods", None) or ())
        if acts and (is_other or _header(scope, b"sec-fetch-mode") == "navigate"):
            return Forbidden("a browser may not do this by following a link: send a POST", code="link")
        return None
    if not is_other or _header(scope, b"content-type").lower().startswith("application/json"):
        return None
    return Forbidden("pages of other origins must send the header 'Content-Type: application/json'", code="other_site")


def _is_local(scope: Scope) -> bool:
    """Returns whether the caller is a program on this machine that acts for itself: not a forwarding proxy, and not a
    browser for another site's page, also not by DNS rebinding."""
    if not scope["client"] or any(name in FORWARDING for name, _ in scope["headers"]) or _is_of_other_page(scope):
        return False
    if scope["client"] == UNIX:  # only its owner may open the socket
        return host_name(_header(scope, b"host")) in LOOPBACK
    try:
        address = ipaddress.ip_address(scope["client"][0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback and host_name(_header(scope, b"host")) in LOOPBACK


def _header(scope: Scope, name: bytes) -> str:
    """Returns the last header of this name; "" if there is none."""
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value.decode("latin-1")


def limited(receive: Receive, scope: Scope, max_bytes: int) -> Receive:
    """Wraps `receive`: raises PayloadTooLarge as soon as the body exceeds `max_bytes`, and RequestTimeout if it is too
    slow."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    num_bytes, waited_s, is_complete = 0, 0.0, False

    def too_large() -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body is larger than {max_bytes} bytes; send less, or start the server with a larger --max-body-bytes"
        )

    async def receive_in_time() -> Message:
        nonlocal waited_s
        limit = asyncio.timeout(None)
        left_s = min(BODY_GRACE_S + num_bytes / MIN_BODY_RATE, MAX_BODY_S) - waited_s
        timer = AwakeTimer(left_s, lambda: limit.reschedule(0.0))
        try:
            async with limit:
                return await receive()
        except TimeoutError:
            raise RequestTimeout(
                f"{num_bytes} bytes of the body came in {waited_s + timer.passed_s:.0f} s; after the first "
                f"{BODY_GRACE_S:.0f} s it must be {MIN_BODY_RATE} bytes a second, and all within {MAX_BODY_S:.0f} s"
            ) from None
        finally:
            timer.cancel()
            waited_s += timer.passed_s

    async def receive_limited() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await receive()
        if declared.isdigit() and int(declared[:18]) > max_bytes:
            raise too_large()
        message = await receive_in_time()
        num_bytes += len(message.get("body", b""))
        is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        if num_bytes > max_bytes:
            raise too_large()
        return message

    return receive_limited
