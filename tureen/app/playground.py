"""Serves the playground: its page at `/` for browsers, and the page's files, unchanged, below `/playground/`."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tureen.app.page import BrowserEntry, compressed
from tureen.errors import NotFound, echo
from tureen.http.dialect import Docs, Entry
from tureen.requests.state import ServerState

FOLDER = "playground"
KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The files that are served; other files in the folder are not."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes(_: ServerState) -> list[Entry]:
    """Returns the routes of the page and of its files."""

    async def index(request: Request) -> Response:
        return _answer(request, "index.html", {"vary": "accept, accept-encoding"})

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files():
            raise NotFound(f"the playground has no file {echo(name)}", code="unknown_route")
        return _answer(request, name, {"vary": "accept-encoding"})

    docs = Docs("Server", "The playground, for browsers.", answer="text/html")
    file_docs = docs._replace(summary="A file of the playground.", answer="text/javascript")
    return [
        BrowserEntry("/", index, access="open", docs=docs),
        Entry(f"/{FOLDER}/{{name:path}}", file, access="open", docs=file_docs),
    ]


@cache
def files() -> frozenset[str]:
    """Returns the names of the files that are served."""
    root = resources.files("tureen.app").joinpath(FOLDER)
    libraries = [f"vendor/{path.name}" for path in root.joinpath("vendor").iterdir()]
    names = [*(path.name for path in root.iterdir()), *libraries]
    return frozenset(name for name in names if _suffix(name) in KINDS)


@cache
def _read(name: str) -> tuple[bytes, str]:
    """Returns a file's bytes and its entity tag."""
    content = resources.files("tureen.app").joinpath(FOLDER, *name.split("/")).read_bytes()
    return content, f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


def _answer(request: Request, name: str, more: dict[str, Any]) -> Response:
    """Returns a file, or 304 if the browser has it. Browsers ask each time, so an upgrade is visible immediately."""
    content, tag = _read(name)
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": tag,
    } | more
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return compressed(request, content, KINDS[_suffix(name)], headers)
