"""Makes self-contained HTML pages, with style and script inside. Serves the page of `/status`."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from tureen.http.dialect import Docs, Entry
from tureen.requests.state import ServerState

PAGES = {"": "Playground", "status": "Status", "docs": "API", "compat": "Compatibility"}
"""Route -> title of the pages that the bar of each page links."""


class BrowserEntry(Entry):
    """A route for browsers. Another route with the same path answers clients that do not ask for HTML."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
            return super().matches(scope)
        return Match.NONE, {}


def routes(_: ServerState) -> list[Entry]:
    """Returns the page of `/status`. It needs no key and holds no figure; the requests of its script need a key."""
    script = "".join(map(asset, ("tips.js", "plots.js", "status.js")))

    async def status(_: Request) -> Response:
        response = page("status", asset("status.html"), script=script, style=asset("status.css"))
        response.headers["vary"] = "accept"
        return response

    docs = Docs("Server", "A page that shows what the server does; JSON for other clients.", answer="text/html")
    return [BrowserEntry("/status", status, access="open", any_model=True, docs=docs)]


@cache
def asset(name: str, folder: str = "pages") -> str:
    """Returns the text of a file of this package, which is in `folder`."""
    return resources.files("tureen.app").joinpath(folder, name).read_text(encoding="utf-8")


def page(path: str, body: str, script: str = "", style: str = "") -> Response:
    """Returns the page of the route `path`. Its Content-Security-Policy allows no other style or script.

    `body`: HTML that begins with the rest of the header, up to `</header>`. `style`: rules of this page, which follow
    those of all pages.
    """
    style = asset("shared.css", "playground") + asset("style.css") + style
    script += asset("theme.js", "playground")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    icon = asset("icon.svg", "playground")
    encoded = base64.b64encode(icon.encode()).decode()
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>tureen: {PAGES[path]}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:image/svg+xml;base64,{encoded}"><style>{style}</style></head>\n'
        f"<body><header>{_bar(path, icon)}{body}<script>{script}</script></body></html>\n"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


def compressed(request: Request, content: bytes, media_type: str, headers: Mapping[str, str]) -> Response:
    """Returns an answer with `content`, compressed if the client accepts gzip. `content` must be the same for all
    requests, because it is compressed once and kept."""
    if not _takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(content, media_type=media_type, headers=headers)
    return Response(_gzipped(content), media_type=media_type, headers={**headers, "content-encoding": "gzip"})


def _takes_gzip(accepted: str) -> bool:
    """Returns whether an Accept-Encoding header names gzip, with a weight above 0 (RFC 9110, 12.5.3)."""
    weights = dict(coding.partition(";")[::2] for coding in accepted.lower().replace(" ", "").split(","))
    return re.fullmatch(r"q=0(\.0*)?", weights.get("gzip", "q=0")) is None


_gzipped = lru_cache(maxsize=64)(gzip.compress)


def _bar(path: str, icon: str) -> str:
    """Returns the bar of a page: icon, links to all pages, and the button that switches colours."""
    links = "".join(
        f'<a href="{route or "./"}"{" aria-current=page" if route == path else ""}>{name}</a>'
        for route, name in PAGES.items()
    )
    drawn = icon.replace("<svg ", '<svg aria-hidden="true" ')
    return (
        f'<div class="top-bar"><p class="brand">{drawn} <span>tureen</span></p>'
        f'<nav class="pages" aria-label="Pages">{links}</nav><div class="spring"></div>'
        '<button type="button" id="theme" aria-label="Dark colours" aria-pressed="false">◐</button></div>\n'
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
