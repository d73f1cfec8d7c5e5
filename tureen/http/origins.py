"""Lets pages of other sites call the server from a browser, where --allowed-origins names them.

Specification: Fetch standard, "CORS protocol" (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware import Middleware

from tureen.errors import StartupError, echo

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
USUAL_PORTS = {"http": ":80", "https": ":443"}
METHODS = ("GET", "HEAD", "POST", "DELETE")
READABLE = ("x-tureen-ignored", "x-request-id", "retry-after")
"""Headers of answers that a script may read, beside those that every script may."""


def check_origins(origins: Sequence[str]) -> None:
    """Raises StartupError naming the first that no browser sends as an origin: scheme, host, and port unless it is the
    scheme's own, in lower case, without a path."""
    for origin in origins:
        usual = USUAL_PORTS.get(origin.partition("://")[0], " ")
        if origin != ANY and (not ORIGIN.fullmatch(origin) or origin.endswith(usual)):
            likely = ORIGIN.match(origin.lower().removesuffix(usual))
            hint = f"; did you mean {likely[0]}?" if likely else ""
            raise StartupError(
                f"--allowed-origins {echo(origin)}: must be * or an origin as browsers send it, such as "
                f"https://chat.example.org or http://localhost:3000{hint}",
                field="allowed_origins",
            )


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Returns what answers preflights and lets scripts of these origins read answers; nothing without origins.

    Cookies are not used here and not allowed: a page sends its key in a header.
    """
    if not origins:
        return []
    from starlette.middleware.cors import CORSMiddleware  # noqa: PLC0415 - no other server needs it

    return [
        Middleware(
            CORSMiddleware,
            allow_origins=tuple(origins),
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=READABLE,
        )
    ]


def is_allowed(origin: str, origins: Sequence[str]) -> bool:
    """Says whether the page of this `Origin` header may call; "" is none."""
    return bool(origin) and (ANY in origins or origin.lower() in origins)
