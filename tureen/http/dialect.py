"""Defines the descriptions of a dialect (`Dialect`) and of a route (`Entry`), and helpers for the routes of all
dialects."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp

from tureen.errors import TureenError
from tureen.fields.body import convert, read_json, refuse_unknown
from tureen.fields.rules import FieldTable
from tureen.http.call import call_of, until_gone
from tureen.http.errors import error_response
from tureen.http.sse import EventStream
from tureen.registry import find_dialects
from tureen.requests.offload import INLINE_CHARS, offload
from tureen.requests.state import ServerState

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

PING_S = 15.0
"""Seconds after which a stream without an event begins. Until the first event, it repeats PING as often."""
PING = b": no token yet\n\n"
"""A comment, which clients of server-sent events skip."""
JSON_BLANKS = b" \t\r\n"
BYTES_PER_CHAR = 8
"""Number of body bytes that take as long to parse as one character takes to tokenize; for `offload`."""

Access = Literal["open", "user", "admin"]
"""Access level of a route: for everyone, for holders of an API key, for holders of the admin key."""

RenderError = Callable[[TureenError], Response]
"""A function that writes errors in the form of one API."""

Routes = Callable[[ServerState], "list[Entry]"]
"""A function that returns the routes of one API."""


class ErrorShape(NamedTuple):
    """The form of an API's errors: name and JSON schema of the object."""

    name: str
    schema: Mapping[str, Any]


PLAIN_ERROR = ErrorShape(
    "PlainError",
    {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    },
)


class Docs(NamedTuple):
    """Documentation of a route, for `/docs` and `/openapi.json`."""

    api: str  # name of the API, by which routes are grouped
    summary: str
    bodies: tuple[type[msgspec.Struct], ...] = ()  # types that a body may have; () = the route takes no body
    example: Mapping[str, Any] | None = None  # a valid body; required when the route takes one
    stream: str | None = None  # media type of its streams; None = it has none
    answer: str = "application/json"  # media type of its other answers
    other_answer: str | None = None  # media type of answers that were asked for in another form
    headers: Mapping[str, str] = {}  # request headers that only this route reads: name -> meaning
    query: type[msgspec.Struct] | None = None  # fields of the query
    form: type[msgspec.Struct] | None = None  # fields of a form with a file; bytes mark the file's field
    error: ErrorShape | None = None  # errors after the body is read; None = our own form
    statuses: Mapping[int, str] = {}  # statuses that only this route answers with -> meaning


class Entry(Route):
    """A route with its access level and its documentation. The gate refuses routes of any other class."""

    max_body_bytes: int | None = None
    """Largest body of this route; None = --max-body-bytes."""

    needs_engine = True
    """The model of the request must be loaded, not merely known."""

    fields: tuple[str, ...] = ()
    """The route accepts only bodies with one of these fields; another route with the same path accepts the rest."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        access: Access,
        methods: Sequence[str] = ("GET",),
        is_limited: bool = True,
        any_model: bool = False,
        docs: Docs | None = None,
        render_error: RenderError = error_response,
    ) -> None:
        """`is_limited`: requests of users count towards --max-client-requests. `any_model`: the route also works with
        embedding models. `render_error`: writes errors in this API's form, including those of middleware."""
        super().__init__(path, endpoint, methods=list(methods))
        self.docs = docs
        self.render_error = render_error
        self.access = access
        self.any_model = any_model
        self.is_limited = is_limited and access == "user" and "GET" not in methods

    def reroute(self, endpoint: Callable[..., Any]) -> None:
        """Replaces the endpoint that answers requests."""
        self.endpoint, self.app = endpoint, request_response(endpoint)

    def at(self, path: str) -> Entry:
        """Returns the same route at another path."""
        copied = copy.copy(self)
        Route.__init__(copied, path, self.endpoint, methods=sorted(self.methods or ()))
        return copied


class BodyPart(NamedTuple):
    """An object of a body, for `/compat`: the body itself, or the object in its field `name`."""

    struct: type[msgspec.Struct]
    table: FieldTable = FieldTable()
    name: str = ""
    aliases: Mapping[str, str] = MappingProxyType({})


class CompatRoute(NamedTuple):
    """A route of another server's API, with the verdicts on its fields, for `/compat`."""

    api: str
    route: str
    parts: tuple[BodyPart, ...]


class BodySection(NamedTuple):
    """A section of docs/parameters.md that lists the fields of `struct`."""

    title: str
    text: str
    struct: type[msgspec.Struct]


Respond = Callable[[dict[str, Any], Request, ServerState], Awaitable[ASGIApp]]


class GenerateForm(NamedTuple):
    """A dialect's bodies on `/generate`, which several dialects share."""

    prompt_fields: tuple[str, ...]  # a body of this dialect has one of them, a body of another dialect none
    body: type[msgspec.Struct]
    respond: Respond
    refuse: Callable[[TureenError], ASGIApp] | None = None  # writes errors about the choice of dialect; None = our form


class Dialect(NamedTuple):
    """An API, as `dialect.py` in its folder describes it; application, `/compat` and docs are derived from it."""

    order: int  # its position in lists and pages
    routes: Routes
    compat: tuple[CompatRoute, ...] = ()
    sections: tuple[BodySection, ...] = ()
    generate: GenerateForm | None = None
    errors_below: Mapping[str, RenderError] = MappingProxyType({})
    """Path prefix -> function that writes the error for an unknown path with that prefix."""
    errors_with: Mapping[tuple[str, str], RenderError] = MappingProxyType({})
    """(path prefix, request header of its clients) -> function that writes errors of unknown paths and of routes
    without a form of their own."""
    field_types: Mapping[tuple[type[msgspec.Struct], str], Any] = MappingProxyType({})
    """(struct, field) -> the type that OpenAPI shows for a field that accepts fewer values than its declared type."""


def dialects() -> list[Dialect]:
    """Returns all dialects, in their order."""
    descriptions: list[Dialect] = [module.DIALECT for module in find_dialects()]
    return sorted(descriptions, key=lambda dialect: dialect.order)


async def read_body(request: Request, kind: type[S]) -> S:
    """Reads the body as `kind`; null means a field's default. An empty body is `{}` if no field is required.

    Raises InvalidRequest, UnsupportedMediaType.
    """
    raw = await request.body()
    is_empty = not raw.strip(JSON_BLANKS) and not any(field.required for field in msgspec.structs.fields(kind))
    payload = {} if is_empty else read_json(request.headers.get("content-type"), raw)
    refuse_unknown(payload, kind.__struct_fields__)
    return convert({name: value for name, value in payload.items() if value is not None}, kind)


async def read_body_with(request: Request, read: Callable[[dict[str, Any]], T], *, of_any_type: bool = False) -> T:
    """Parses the body as a JSON object and returns the result of `read`, in a thread if the body is large. Raises
    InvalidRequest, UnsupportedMediaType.

    `of_any_type`: ignores the header Content-Type."""
    raw = await request.body()
    payload = read_json(None if of_any_type else request.headers.get("content-type"), raw)
    return await offload.run(len(raw) // BYTES_PER_CHAR, lambda: read(payload))


async def prepared(request: Request, work: Awaitable[T], *, takes_time: bool = False) -> T:
    """Returns the result of `work`, which turns a body into requests. If that may take time (`takes_time`, or a large
    body), raises ClientGone as soon as the client leaves."""
    takes_time = takes_time or len(await request.body()) > INLINE_CHARS
    return await (unless_gone(request, work) if takes_time else work)


def client_name(request: Request) -> str:
    """Returns the name of a request's API key, or the subject of its TLS certificate; "" = anonymous."""
    return call_of(request.scope).client_name


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the client leaves first, cancels the work and raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


async def streamed(
    request: Request,
    events: AsyncGenerator[bytes, None],
    last: Callable[[TureenError], bytes],
    headers: Mapping[str, str] | None = None,
    *,
    end: bytes = b"",
) -> EventStream:
    """Returns a streaming response of at least one event, followed by `end`.

    An error before the response begins is raised; a later one becomes the last event, which `last` writes. The response
    begins with the first event, or after PING_S without one, so that clients and proxies do not give up. Raises
    ClientGone.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_gone(request, asyncio.wait({first}, timeout=PING_S))
        if first.done():
            first.result()
    except BaseException:
        await _cancel(first)
        raise
    ping = b"" if headers and "content-type" in headers else PING
    return EventStream(_guarded(first, events, last, end, ping), dict(headers or {}))


async def _guarded(
    first: asyncio.Future[bytes],
    rest: AsyncGenerator[bytes, None],
    last: Callable[[TureenError], bytes],
    end: bytes,
    ping: bytes,
) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(rest):
            try:
                while not first.done():
                    if ping:
                        yield ping
                    await asyncio.wait({first}, timeout=PING_S)
                yield first.result()
            finally:
                await _cancel(first)
            async for chunk in rest:
                yield chunk
    except TureenError as error:
        yield last(error)
    if end:
        yield end


async def _cancel(future: asyncio.Future[bytes]) -> None:
    future.cancel()
    await asyncio.wait({future})
    if not future.cancelled():
        future.exception()  # asyncio logs one that is never read
