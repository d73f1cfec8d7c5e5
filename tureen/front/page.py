"""Makes HTML pages that need nothing from elsewhere: style and script are inside. Serves the one of `/status`."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from tureen.http.dialect import Docs, Entry
from tureen.requests.state import ServerState


class BrowserEntry(Entry):
    """A route for browsers. A client that does not ask for HTML gets what another route of the same path answers."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
            return super().matches(scope)
        return Match.NONE, {}


def routes(_: ServerState) -> list[Entry]:
    """Returns the page of `/status`. It is open and holds no figure: what its script asks for needs a key."""

    async def status(_: Request) -> Response:
        response = page("tureen: status", asset("status.html"), script=asset("status.js"), style=asset("status.css"))
        response.headers["vary"] = "accept"
        return response

    docs = Docs("Server", "A page that shows what the server does; JSON for other clients.", answer="text/html")
    return [BrowserEntry("/status", status, access="open", any_model=True, docs=docs)]


@cache
def asset(name: str) -> str:
    """Returns the text of a file in this package's folder `pages`."""
    return resources.files("tureen.front").joinpath("pages", name).read_text(encoding="utf-8")


def page(title: str, body: str, script: str = "", style: str = "") -> Response:
    """Returns a page around `body`, which is HTML. Its Content-Security-Policy allows no other style or script.

    `style`: rules of this page, behind those of all.
    """
    style = asset("style.css") + style
    code = f"<script>{script}</script>" if script else ""
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>\n'
        f"<body>{body}{code}</body></html>\n"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
