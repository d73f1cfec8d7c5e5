"""Checks request line and headers by RFC 9110 and RFC 9112 where the parser is less strict.

A proxy or filter in front of this server must read the same requests, for the same host, from the same bytes: otherwise
requests can be smuggled past it.
"""

from __future__ import annotations

import ipaddress
import re

from tureen.errors import InvalidRequest, echo

Headers = list[tuple[bytes, bytes]]
"""Header names, in lower case, and values."""

ONCE = frozenset(
    b"host content-length transfer-encoding content-type authorization x-api-key origin sec-fetch-site "
    b"sec-fetch-mode last-event-id".split()
)
"""Headers that may be sent only once, because no decision may depend on which of two is read."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE | re.ASCII)
_AUTHORITY = re.compile(rb"https?://([^/?#]*)/", re.IGNORECASE)


def body_length(method: bytes, version: str, headers: Headers) -> int | None:
    """Returns the length of the body in bytes; None = it is chunked. Raises InvalidRequest for headers that are
    ambiguous or not allowed. Source: RFC 9112, 3.2 and 6."""
    if version not in ("1.0", "1.1"):
        raise InvalidRequest(f"HTTP/{version} is not supported; use HTTP/1.1", code="invalid_http")
    if method == b"CONNECT":
        raise InvalidRequest("this server is not a proxy: CONNECT is not supported", code="invalid_http")
    values: dict[bytes, str] = {}
    for name, value in headers:
        if name in values and name in ONCE:
            raise _wrong(name, f"is there more than once, with {echo(values[name])} first; send it once")
        values[name] = value.decode("latin-1").strip(" \t")
    host = values.get(b"host")
    if host is None and version == "1.1":
        raise _wrong(b"host", "is missing; send the host name of the server")
    if host is not None and host_name(host) is None:
        raise _wrong(b"host", f"must be NAME or NAME:PORT, got {echo(host)}")
    coding = values.get(b"transfer-encoding")
    if coding is None:
        return int(values.get(b"content-length", 0))
    if coding.lower() != "chunked" or version == "1.0" or b"content-length" in values:
        raise _wrong(
            b"transfer-encoding",
            f"must be 'chunked', in HTTP/1.1 and without Content-Length, got {echo(coding)} in HTTP/{version}",
        )
    return None


def host_name(host: str) -> str | None:
    """Returns the host of a Host header, without port, in lower case, IPv6 addresses in short form; None = no valid
    host."""
    match = _HOST.fullmatch(host)
    if match is None or int(match[2] or 0) > 65535:
        return None
    name = match[1].lower()
    if not name.startswith("["):
        return name
    try:
        return str(ipaddress.IPv6Address(name[1:-1]))
    except ValueError:
        return None


def authority(target: bytes) -> bytes | None:
    """Returns the host of a request target in absolute form, which replaces the Host header (RFC 9112, 3.2.2); None = a
    target without host.

    Raises InvalidRequest for a target that is neither a path nor an http or https URL, and for one with a fragment,
    which some parsers drop and others count as part of the path.
    """
    match = None if target.startswith(b"/") else _AUTHORITY.match(target)
    if b"#" in target or not (match or target.startswith(b"/")):
        allowed = "the request target must be a path or an http:// URL, without #"
        raise InvalidRequest(f"{allowed}, got {echo(target.decode('latin-1'))}", code="invalid_http")
    return match[1] if match else None


def _wrong(name: bytes, problem: str) -> InvalidRequest:
    title = name.decode().title()
    return InvalidRequest(
        f"the header {title} {problem}", field=title, code=f"invalid_{title.lower().replace('-', '_')}"
    )
