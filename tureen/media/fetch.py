"""Fetches pictures that are URLs: the one place that fetches anything for a client.

A URL is taken apart by one strict pattern and never put together again. Its host must be one that the operator named.
That host is looked up once, every address found must be a public one, and such an address is what is dialled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httptools

from tureen.errors import Forbidden, InvalidRequest, StartupError, echo
from tureen.media.references import MAX_BYTES

TIMEOUT_S = 5.0
"""Seconds for one URL: look-up, connection, TLS and answer, all together."""

MAX_ADDRESSES = 4
MAX_HEAD_BYTES = 64 << 10
MAX_URL_CHARS = 8192
CHUNK_BYTES = 64 << 10
PORTS = {"http": 80, "https": 443}
HOST_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""A host name, whose last part begins with a letter, so that no number in any notation is one."""

URL = re.compile(r"(https?)://([a-z0-9._-]+)(?::(80|443))?(/[!-\[\]-~]*|\?[!-\[\]-~]*)?", re.ASCII | re.IGNORECASE)
"""Scheme, host, port, path with query: printable ASCII without a backslash. Nothing else is allowed: no user, no other
port."""

GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")))
"""Networks that some versions of Python take for global: protocol assignments, tunnels that hold another address,
examples."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[list[str]]]
Connect = Callable[[str, int, ssl.SSLContext | None, str], Awaitable[Connection]]


class FetchTarget(NamedTuple):
    """The parts of a URL."""

    is_tls: bool
    host: str
    port: int
    path: str  # with the query


class FetchFailed(Exception):
    """A picture could not be fetched; the message is for the client."""


class HttpAnswer:
    """The part of an HTTP answer that has come so far: it has the methods that httptools' parser calls."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.is_compressed = False
        self.num_heads = 0
        self.has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.is_compressed |= name == b"content-encoding" and value.strip().lower() not in (b"", b"identity")
        self.has_length |= name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.num_heads += 1

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


def check_domains(names: tuple[str, ...]) -> frozenset[str]:
    """Returns the host names in --allowed-media-domain. Raises StartupError naming one that is no host name."""
    for name in names:
        if not HOST_NAME.fullmatch(name.lower()):
            raise StartupError(
                f"--allowed-media-domain {echo(name)}: give the name of one host, such as images.example.com, without "
                "scheme, port, path or *; IP addresses are not allowed"
            )
    return frozenset(name.lower() for name in names)


def parse_url(url: str, domains: frozenset[str], field: str) -> FetchTarget:
    """Takes a URL apart. Raises Forbidden, under the client's name `field`, for one that is not fetched."""
    match = URL.fullmatch(url.partition("#")[0]) if len(url) <= MAX_URL_CHARS else None
    if match is None:
        raise Forbidden(
            f"{field} is a URL that is not fetched: it must be http(s)://HOST/PATH on port 80 or 443, without user and "
            f"password, at most {MAX_URL_CHARS} characters, all else than plain ASCII percent-encoded",
            field=field,
            code="media_url_forbidden",
        )
    scheme, host = match[1].lower(), match[2].lower()
    if host not in domains:
        raise Forbidden(
            f"{field} is a URL of the host {echo(host)}; only hosts named with --allowed-media-domain are fetched "
            "from; send the picture itself, as base64",
            field=field,
            code="media_url_forbidden",
        )
    path = match[4] or "/"
    return FetchTarget(scheme == "https", host, int(match[3] or PORTS[scheme]), path if path[0] == "/" else f"/{path}")


def is_public(address: str) -> bool:
    """Says whether an address belongs to the internet at large. An address that holds another one does not."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_multicast or parsed.is_private or parsed.is_reserved or not parsed.is_global:
        return False
    if any(parsed in network for network in NOT_PUBLIC):
        return False
    return isinstance(parsed, ipaddress.IPv4Address) or parsed in GLOBAL_V6


async def look_up(host: str, port: int) -> list[str]:
    """Returns the addresses of a host. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


async def dial(address: str, port: int, tls: ssl.SSLContext | None, host: str) -> Connection:
    """Connects to an address. With `tls`, the certificate must be the host's. Raises OSError."""
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=host if tls else None)


class Fetcher:
    """Fetches from the hosts it was given, and from nowhere else. It uses no proxy, no cookie, no redirect."""

    def __init__(self, domains: tuple[str, ...], *, resolve: Resolve = look_up, connect: Connect = dial) -> None:
        """domains: values of --allowed-media-domain. Raises StartupError."""
        self._domains = check_domains(domains)
        self._resolve = resolve
        self._connect = connect
        self._tls = ssl.create_default_context() if domains else None

    def check(self, url: str, field: str) -> None:
        """Raises Forbidden for a URL that may not be fetched, as far as its text tells."""
        parse_url(url, self._domains, field)

    async def fetch(self, url: str, field: str) -> bytes:
        """Fetches at most MAX_BYTES within TIMEOUT_S. Raises Forbidden, InvalidRequest."""
        target = parse_url(url, self._domains, field)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._get(target, await self._addresses(target, field))
        except TimeoutError:
            fault = f"it was not there within {TIMEOUT_S:g} s"
        except FetchFailed as error:
            fault = str(error)
        except ssl.SSLError:
            fault = "TLS with its host fails: its certificate is not valid for this name, or it does not speak TLS"
        except OSError:
            fault = "its host cannot be reached"
        raise InvalidRequest(f"{field} could not be fetched: {fault}", field=field, code="media_fetch_failed")

    async def _addresses(self, target: FetchTarget, field: str) -> list[str]:
        addresses = await self._resolve(target.host, target.port)
        if not all(map(is_public, addresses)):
            raise Forbidden(
                f"{field} is a URL of the host {echo(target.host)}, which has an address that is not public",
                field=field,
                code="media_url_forbidden",
            )
        return addresses[:MAX_ADDRESSES]

    async def _get(self, target: FetchTarget, addresses: list[str]) -> bytes:
        """Raises OSError, Failed."""
        reader, writer = await self._dial(target, addresses)
        try:
            writer.write(_request(target))
            return await _body(reader)
        finally:
            writer.transport.abort()

    async def _dial(self, target: FetchTarget, addresses: list[str]) -> Connection:
        """Connects to the first address that takes the connection. Raises OSError."""
        fault = OSError("no address")
        for address in addresses:
            try:
                return await self._connect(address, target.port, self._tls if target.is_tls else None, target.host)
            except OSError as error:
                fault = error
        raise fault


async def _body(reader: asyncio.StreamReader) -> bytes:
    """Reads the body of an HTTP answer. Raises OSError, FetchFailed as soon as it cannot become a picture."""
    answer = HttpAnswer()
    parser = httptools.HttpResponseParser(answer)
    received = 0
    while not answer.is_complete:
        data = await reader.read(CHUNK_BYTES)
        if not data and (answer.has_length or not answer.num_heads):
            raise FetchFailed("its host closed the connection too early")
        if not data:
            break
        received += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not answer.is_complete:
                raise FetchFailed("its host does not answer with HTTP") from None
        if answer.num_heads:
            _check_head(parser.get_status_code(), answer)
        if len(answer.body) > MAX_BYTES:
            raise FetchFailed(f"it has more than {MAX_BYTES >> 20} MiB")
        if received > MAX_HEAD_BYTES + 2 * len(answer.body):
            raise FetchFailed("its host sends too much in addition to the picture")
    return bytes(answer.body)


def _check_head(status: int, answer: HttpAnswer) -> None:
    if 300 <= status < 400:
        raise FetchFailed(f"its host redirects (HTTP {status}), which is not followed")
    if status != 200:
        raise FetchFailed(f"its host answers with HTTP {status}")
    if answer.num_heads > 1:
        raise FetchFailed("its host sends data after the picture")
    if answer.is_compressed:
        raise FetchFailed("its host compresses it, although it was asked not to")


def _request(target: FetchTarget) -> bytes:
    default = PORTS["https" if target.is_tls else "http"]
    host = target.host if target.port == default else f"{target.host}:{target.port}"
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {host}",
        "Accept: image/*, video/*",
        "Accept-Encoding: identity",
        "User-Agent: tureen",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")
