"""`/compat`: of each API that clients speak, which fields are honoured, refused or differ; made of declarations."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tureen.front.page import page
from tureen.http.dialect import Docs, Entry, SpokenRoute, dialects
from tureen.requests.state import ServerState

Standing = Literal["honoured", "differs", "refused"]


class FieldVerdict(NamedTuple):
    """What becomes of a field."""

    field: str
    standing: Standing
    note: str


LEAD = """\
<header><h1>What of each API is honoured</h1><a href="docs">routes and fields</a> <a href="compat.json">as JSON</a>
<p>Every field is acted on or refused by name. A field that is on no list is refused with the nearest name.</p></header>
"""


def routes(_: ServerState) -> list[Entry]:
    async def compat(request: Request) -> Response:
        kinds = request.headers.get("accept", "")
        if "application/json" in kinds and "text/html" not in kinds:
            return _as_json()
        return page("tureen: compatibility", LEAD + "".join(_section(one) for one in spoken_routes()))

    async def compat_json(_: Request) -> Response:
        return _as_json()

    docs = Docs("Server", "Of each API: which fields are honoured, which refused.", answer="text/html")
    return [
        Entry("/compat", compat, access="open", docs=docs),
        Entry("/compat.json", compat_json, access="open", docs=docs._replace(answer="application/json")),
    ]


def spoken_routes() -> list[SpokenRoute]:
    """All routes of APIs that were somebody else's first."""
    return [route for dialect in dialects() for route in dialect.spoken]


def rows_of(spoken: SpokenRoute) -> Iterator[FieldVerdict]:
    """Every field that has an answer of its own: those declared, then those that are not offered."""
    for part in spoken.parts:
        front = f"{part.name}." if part.name else ""
        for field in msgspec.structs.fields(part.struct):
            name, note = field.encode_name, part.table.told.get(field.encode_name)
            if name not in part.table.refused:
                yield FieldVerdict(
                    front + name, "honoured" if note is None else "differs", note or _meaning(field.type)
                )
        for alias, name in part.aliases.items():
            yield FieldVerdict(front + alias, "honoured", f"The same as {name}.")
    for part in spoken.parts:
        front = f"{part.name}." if part.name else ""
        for name, (_, why) in sorted(part.table.refused.items()):
            yield FieldVerdict(front + name, "refused", why)


def _meaning(kind: Any) -> str:
    """The description beside a declared type."""
    metas = [one for one in get_args(kind)[1:] if isinstance(one, msgspec.Meta)]
    return next((one.description for one in metas if one.description), "")


def _as_json() -> Response:
    table = [
        {"api": one.api, "route": one.route, "fields": [row._asdict() for row in rows_of(one)]}
        for one in spoken_routes()
    ]
    return Response(msgspec.json.encode({"apis": table}), media_type="application/json")


def _section(spoken: SpokenRoute) -> str:
    lines = [
        f"<tr><td><code>{html.escape(row.field)}</code></td><td class={row.standing}>{row.standing}</td>"
        f"<td>{html.escape(row.note)}</td></tr>"
        for row in rows_of(spoken)
    ]
    heading = f"<h2>{html.escape(spoken.api)} <code>{spoken.route}</code></h2>"
    return f"{heading}<table><tr><th>field</th><th></th><th></th></tr>{''.join(lines)}</table>\n"
