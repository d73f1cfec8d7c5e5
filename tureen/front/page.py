"""Makes HTML pages that need nothing from elsewhere: style and script are inside."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse, Response


@cache
def asset(name: str) -> str:
    """Returns the text of a file in this package's folder `pages`."""
    return resources.files("tureen.front").joinpath("pages", name).read_text(encoding="utf-8")


def page(title: str, body: str, script: str = "") -> Response:
    """Returns a page around `body`, which is HTML. Its Content-Security-Policy allows no other style or script."""
    style = asset("style.css")
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
