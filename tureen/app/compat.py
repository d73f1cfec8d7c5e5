"""Serves `/compat`: which fields of each API are honoured, refused or different, derived from the dialects."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tureen.app.page import asset, page
from tureen.http.dialect import CompatRoute, Docs, Entry, dialects
from tureen.requests.state import ServerState

Standing = Literal["honoured", "differs", "reported", "refused"]


class FieldVerdict(NamedTuple):
    """The verdict on a field."""

    field: str
    standing: Standing
    note: str


CODE = re.compile(r"`([^`]+)`")

LEAD = """\
<h1>API compatibility</h1> <a href="compat.json">as JSON</a>
<p>A field takes effect, is refused with an error that names it, or is accepted without effect and reported in the
answer's header <code>x-tureen-ignored</code>.</p>
<input id="find" type="search" placeholder="find a field" aria-label="find a field">
<span id="found" role="status"></span>
</header>
<main>{}</main>
"""


def routes(_: ServerState) -> list[Entry]:
    """Returns the routes `/compat` and `/compat.json`."""

    async def compat(request: Request) -> Response:
        kinds = request.headers.get("accept", "")
        if "application/json" in kinds and "text/html" not in kinds:
            return _as_json()
        sections = "".join(_section(route) for route in compat_routes())
        return page("compat", LEAD.format(sections), script=asset("compat.js"))

    async def compat_json(_: Request) -> Response:
        return _as_json()

    docs = Docs("Server", "Which fields of each API are honoured, refused, or reported as ignored.", answer="text/html")
    return [
        Entry("/compat", compat, access="open", docs=docs),
        Entry("/compat.json", compat_json, access="open", docs=docs._replace(answer="application/json")),
    ]


def compat_routes() -> list[CompatRoute]:
    """Returns the routes of all dialects that follow another server's API."""
    return [route for dialect in dialects() for route in dialect.compat]


def rows_of(route: CompatRoute) -> Iterator[FieldVerdict]:
    """Yields the verdict on each field: first declared fields, then fields without effect, then refused fields."""
    for part in route.parts:
        front = f"{part.name}." if part.name else ""
        for field in msgspec.structs.fields(part.struct):
            name, note = field.encode_name, part.table.differs.get(field.encode_name)
            if name not in part.table.refused and name not in part.table.told:
                yield FieldVerdict(
                    front + name, "honoured" if note is None else "differs", note or _meaning(field.type)
                )
        for alias, name in part.aliases.items():
            yield FieldVerdict(front + alias, "honoured", f"The same as {name}.")
    for part in route.parts:
        front = f"{part.name}." if part.name else ""
        for name, verdict in sorted(part.table.told.items()):
            yield FieldVerdict(front + name, "reported", verdict.why)
    for part in route.parts:
        front = f"{part.name}." if part.name else ""
        for name, (_, why) in sorted(part.table.refused.items()):
            yield FieldVerdict(front + name, "refused", why)


def _meaning(kind: Any) -> str:
    """Returns the description of a declared type; "" if it has none."""
    metas = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    return next((meta.description for meta in metas if meta.description), "")


def _as_json() -> Response:
    table = [
        {
            "api": route.api,
            "route": route.route,
            "other_fields": _other_fields(route),
            "fields": [row._asdict() for row in rows_of(route)],
        }
        for route in compat_routes()
    ]
    return Response(msgspec.json.encode({"apis": table}), media_type="application/json")


def _other_fields(route: CompatRoute) -> Standing:
    """Returns what happens to fields that are in no list."""
    return "reported" if route.parts[0].table.tells_unknown else "refused"


def _prose(text: str) -> str:
    """Return a text as HTML, with Markdown's `code` in it."""
    return CODE.sub(r"<code>\1</code>", html.escape(text))


def _section(route: CompatRoute) -> str:
    lines = [
        f"<tr><td><code>{html.escape(row.field)}</code></td><td class={row.standing}>{row.standing}</td>"
        f"<td>{_prose(row.note)}</td></tr>"
        for row in rows_of(route)
    ]
    name = f"{html.escape(route.api)} <code>{route.route}</code>"
    heading = f"<summary><h2>{name}</h2><span>{len(lines)} {'field' if len(lines) == 1 else 'fields'}</span></summary>"
    others = f"<p>Fields that are not listed are {_other_fields(route)}.</p>"
    head = "<thead><tr><th scope=col>field</th><th scope=col>what happens</th><th scope=col>details</th></tr></thead>"
    table = f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"
    return f"<details>{heading}<div class=wide>{others}{table}</div></details>\n"
