"""What a dialect is, and what all of them need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tureen.errors import TureenError
from tureen.http.call import call_of
from tureen.http.errors import error_response
from tureen.http.sse import EventStream, until_gone
from tureen.registry import find_dialects
from tureen.requests.body import convert, read_json, refuse_unknown
from tureen.requests.offload import INLINE_CHARS, offload
from tureen.requests.state import ServerState
from tureen.requests.verdicts import FieldTable

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

BYTES_PER_CHAR = 8
"""Bytes of a body that are read in the time in which a character is tokenized."""

Access = Literal["open", "user", "admin"]
"""Who may call a route: anybody, who has an API key, who has the admin key."""

Routes = Callable[[ServerState], "list[Entry]"]
"""A module's `routes(state)`: the paths of one API."""


class ErrorShape(NamedTuple):
    """How an API writes errors: the name and the JSON schema of the object."""

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
    """What `/docs` tells of a route."""

    api: str  # the group it stands in: whose API it is
    summary: str
    bodies: tuple[type[msgspec.Struct], ...] = ()  # what a body may be; none = the route takes no body
    example: Mapping[str, Any] | None = None  # a body that works; needed where the route takes one
    stream: str | None = None  # media type of its streams; None = it has none
    answer: str = "application/json"  # media type of its other answers
    headers: Mapping[str, str] = {}  # request headers of its own: name -> meaning
    error: ErrorShape | None = None  # of this API; what is refused before a body is read has ours


class Entry(Route):
    """A route that says who may call it. A route that does not is closed to everybody."""

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
        render_error: Callable[[TureenError], Response] = error_response,
    ) -> None:
        """`is_limited`: what users send here counts towards --max-client-requests. `any_model`: users' work that a
        model that makes embeddings does too. `render_error`: how this API writes an error that comes before its answer,
        the gate's too."""
        super().__init__(path, endpoint, methods=list(methods))
        self.docs = docs
        self.render_error = render_error
        self.access = access
        self.any_model = any_model
        self.is_limited = is_limited and access == "user" and "GET" not in methods


class BodyPart(NamedTuple):
    """An object of a body: the body itself, or one that stands in it under `name`."""

    struct: type[msgspec.Struct]
    table: FieldTable = FieldTable()
    name: str = ""
    aliases: Mapping[str, str] = MappingProxyType({})


class SpokenRoute(NamedTuple):
    """One route of an API that was somebody else's first; what becomes of its fields, for `/compat`."""

    api: str
    route: str
    parts: tuple[BodyPart, ...]


class BodySection(NamedTuple):
    """A section of the page of parameters."""

    title: str
    text: str
    struct: type[msgspec.Struct]


Respond = Callable[[dict[str, Any], Request, ServerState], Awaitable[ASGIApp]]


class GenerateForm(NamedTuple):
    """Bodies of this dialect that are sent to `/generate`, which several share."""

    prompt_fields: tuple[str, ...]  # one of them is in a body, and only in those of this dialect
    body: type[msgspec.Struct]
    respond: Respond
    refuse: Callable[[TureenError], ASGIApp] | None = None  # writes errors about the choice of dialect; None = as ours


class Dialect(NamedTuple):
    """An API that clients speak, as the file `dialect.py` in its folder describes it. Everything else finds it here."""

    order: int  # where lists and pages have it
    routes: Routes
    spoken: tuple[SpokenRoute, ...] = ()
    sections: tuple[BodySection, ...] = ()
    generate: GenerateForm | None = None
    meant: Mapping[tuple[type[msgspec.Struct], str], Any] = MappingProxyType({})
    """Fields that take other values than the type they are decoded into says, for OpenAPI."""


def dialects() -> list[Dialect]:
    """All of them, in order."""
    found: list[Dialect] = [module.DIALECT for module in find_dialects()]
    return sorted(found, key=lambda dialect: dialect.order)


async def read_body(request: Request, kind: type[S]) -> S:
    """The body as declared; null is the default, and an empty body is `{}` where no field is needed.

    Raises InvalidRequest.
    """
    raw = await request.body()
    is_empty = not raw.strip() and not any(field.required for field in msgspec.structs.fields(kind))
    given = {} if is_empty else read_json(request.headers.get("content-type"), raw)
    refuse_unknown(given, kind.__struct_fields__)
    return convert({name: value for name, value in given.items() if value is not None}, kind)


async def read_with(request: Request, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the body, which is an object. Raises InvalidRequest."""
    raw = await request.body()
    given = read_json(request.headers.get("content-type"), raw)
    return await offload.run(len(raw) // BYTES_PER_CHAR, lambda: read(given))


async def prepared(request: Request, work: Awaitable[T], *, takes_time: bool = False) -> T:
    """The result of `work`, which reads a body. Where that takes time, as for a large body it may, the client's leaving
    ends it: raises ClientGone."""
    takes_time = takes_time or len(await request.body()) > INLINE_CHARS
    return await (unless_gone(request, work) if takes_time else work)


def client_name(request: Request) -> str:
    """Who sent a request: the name of its API key, or the subject of its certificate; "" = nobody in particular."""
    return call_of(request.scope).client_name


class ClientGone(Exception):
    """The client closed the connection before its answer was there; nobody reads what comes."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; when the client leaves first, cancels it and raises ClientGone."""
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
    """A response of these events, of which there is at least one, and `end`. An error before the first event is raised;
    a later one becomes the last event, as `last` writes it."""
    first = await unless_gone(request, anext(events))
    return EventStream(_guarded(first, events, last, end), dict(headers or {}))


async def _guarded(
    first: bytes, rest: AsyncGenerator[bytes, None], last: Callable[[TureenError], bytes], end: bytes
) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(rest):
            yield first
            async for one in rest:
                yield one
    except TureenError as error:
        yield last(error)
    if end:
        yield end
