"""Decides which web pages may call the server from a browser: CORS, and a defence against DNS rebinding.

--allowed-origins names pages of other sites that may call. Specification: Fetch standard, "CORS protocol"
(https://fetch.spec.whatwg.org/#http-cors-protocol).

A page can also make its own name resolve to this server. The browser then takes the server for the page's site, so
neither CORS nor Origin stops the page; only the Host header still has the site's name. The page has no API key. An
IP address cannot be rebound, nor can a name that the public DNS does not resolve.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Sequence

from starlette.middleware import Middleware

from tureen.config import Config
from tureen.errors import Forbidden, StartupError, echo
from tureen.http.head import host_name
from tureen.http.listener import LOOPBACK

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
USUAL_PORTS = {"http": ":80", "https": ":443"}
PRIVATE_DOMAINS = (".local", ".localhost", ".internal", ".home.arpa", ".svc")
"""Domains that no registrar sells: RFC 6762, RFC 6761, ICANN's resolution 2024.07.29.06, RFC 8375, Kubernetes."""
METHODS = ("GET", "HEAD", "POST", "DELETE")
READABLE = ("x-tureen-ignored", "x-request-id", "request-id", "retry-after")
"""Headers of answers that a script may read, beside those that every script may."""


def check_origins(origins: Sequence[str]) -> None:
    """Raises StartupError naming the first entry that no browser sends as an origin. An origin has a scheme, a host,
    and a port unless it is the scheme's default, in lower case and without a path."""
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
    """Returns the middleware that answers preflights and lets scripts of these origins read answers; [] without
    origins.

    It allows no cookies, which are not used: a page sends its key in a header.
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
    """Returns whether the page of this `Origin` header may call. "" = the request has no such header."""
    return bool(origin) and (ANY in origins or origin.lower() in origins)


def check_hosts(hosts: Sequence[str]) -> None:
    """Raises StartupError naming the first entry that is neither * nor a host name or address without a port."""
    for host in hosts:
        if host != ANY and (host_name(host) is None or host_name(f"{host}:1") is None):
            raise StartupError(
                f"--allowed-hosts {echo(host)}: must be * or a host name without scheme and port, such as "
                "llm.example.org",
                field="allowed_hosts",
            )


class Hosts:
    """The host names that a request without an API key may use."""

    def __init__(self, config: Config) -> None:
        allowed = {host_name(host) for host in config.allowed_hosts}
        self.is_for_this_machine = config.host in LOOPBACK
        self._takes_any = ANY in config.allowed_hosts
        self._names = {*LOOPBACK, *allowed, config.host.lower()}
        if not self.is_for_this_machine and not self._takes_any:
            self._names.add(socket.gethostname().lower())
            # A resolver may take seconds to answer.
            threading.Thread(target=lambda: self._names.add(socket.getfqdn().lower()), daemon=True).start()

    def refusal(self, host: str) -> Forbidden | None:
        """Returns the error for a request with this Host header and without a key; None = it may call."""
        name = host_name(host)
        if self._takes_any or name in self._names or (not self.is_for_this_machine and not _may_be_rebound(name)):
            return None
        return Forbidden(
            f"the Host header says {echo(host)}, which is not a name of this server, and the request has no API key; "
            "start the server with --allowed-hosts NAME to allow this name without a key",
            field="Host",
            code="invalid_host",
        )


def _may_be_rebound(name: str | None) -> bool:
    """Returns whether this name could be registered in the public DNS. None = the request has no Host header, which
    browsers always send."""
    if name is None:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.rstrip(".")
        return "." in name and not name.endswith(PRIVATE_DOMAINS)
    return False
