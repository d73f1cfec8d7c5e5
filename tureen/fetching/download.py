"""Downloads files over HTTP: goes on where an earlier attempt ended, checks digests, says in a line what is wrong.

A file that is being fetched lies beside its place under a name that ends with PART. HTTPS_PROXY, HTTP_PROXY and
NO_PROXY are honoured, SSL_CERT_FILE too.
"""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import http.client
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import IO, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from tureen import __version__
from tureen.errors import StartupError, excerpt
from tureen.files import PART
from tureen.log import size

CHUNK_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 30.0
"""Seconds without a byte after which a connection counts as lost."""
RETRIES: Final = 5
"""Attempts in a row that bring nothing new, before a download is given up."""
MAX_PAUSE_S: Final = 30.0
BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of a server that may have more to say later."""
CERTIFICATES: Final = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables that name a file of authorities; SSL_CERT_FILE is OpenSSL's own."""
Received = Callable[[int], None]
"""Hears how many bytes of the file are there."""


class RemoteFile(NamedTuple):
    """A file on a server. `digest`: sha256:HEX, or git:HEX, the name that git has for its content; "" = not known."""

    url: str
    size: int | None = None
    digest: str = ""
    headers: Mapping[str, str] = {}


class HttpFault(Exception):
    """A server's refusal. `code`: the hub's word for it (X-Error-Code), or ""."""

    def __init__(self, status: int, url: str, headers: Message) -> None:
        self.status = status
        self.host = urlsplit(url).hostname or url
        self.code = headers.get("X-Error-Code") or ""
        self.range = headers.get("Content-Range") or ""
        self.retry_after = headers.get("Retry-After") or ""
        super().__init__(f"{self.host} answers {status}" + (f" ({self.code})" if self.code else ""))


class Unreachable(Exception):
    """No answer came; the message is the reason, in words that name the host."""


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirections, and takes credentials along to the same host only, and never out of HTTPS."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if new is not None and (after.netloc != before.netloc or (before.scheme, after.scheme) == ("https", "http")):
            new.headers.pop("Authorization", None)
        return new


def open_url(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """Opens a URL for reading, http, https or file. Raises HttpFault, Unreachable."""
    url, authorization = _without_credentials(url)
    every = {"User-Agent": f"tureen/{__version__}", **authorization, **(headers or {})}
    opener = urllib.request.build_opener(_SameHost, urllib.request.HTTPSHandler(context=_trusted()))
    try:
        return opener.open(urllib.request.Request(url, headers=every), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            raise HttpFault(error.code, url, error.headers) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(_reason(error, url)) from None


def read_url(url: str, headers: Mapping[str, str] | None = None, *, at_most: int = 64 << 20) -> tuple[bytes, str]:
    """Returns a URL's content and its type. Raises HttpFault, Unreachable, also for more than `at_most` bytes."""
    with open_url(url, headers) as answer:
        try:
            content = answer.read(at_most + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(_reason(error, url)) from None
        if len(content) > at_most:
            raise Unreachable(f"{urlsplit(url).hostname} sends a page of more than {at_most >> 20} MiB")
        return content, answer.headers.get_content_type()


def fetch(remote: RemoteFile, target: Path, received: Received) -> str:
    """Fetches a file to `target`, beside which it lies as PART until it is whole and checked. Returns its hash.

    The rest of an earlier attempt is gone on with. Raises HttpFault, Unreachable, OSError, and StartupError for a disk
    that is too small and for content that is not the expected one.
    """
    part = target.with_name(target.name + PART)
    if target.exists():
        os.replace(target, part)  # it may be incomplete or wrong
    had = _size(part)
    digest = _fetch_part(remote, part, received)
    if had and not _is_right(remote, part, digest):  # what was there may have been of another file
        part.unlink()
        digest = _fetch_part(remote, part, received)
    actual: str = digest.hexdigest()
    if not _is_right(remote, part, digest):
        part.unlink()
        kind, _, expected = remote.digest.partition(":")
        raise StartupError(
            f"{urlsplit(remote.url).path.rpartition('/')[2]} has {kind} {actual}, expected {expected}; it was damaged "
            "or replaced: do not use it, try another index, mirror or network"
        )
    os.replace(part, target)
    return actual


def _fetch_part(remote: RemoteFile, part: Path, received: Received) -> Any:
    if remote.size is not None:
        require_room(part.parent, remote.size - _size(part))
    received(_size(part))
    return _attempts(remote, part, received)


def _attempts(remote: RemoteFile, part: Path, received: Received) -> Any:
    """Downloads what `part` lacks; goes on after interruptions, once something has come. Returns the hash of all of
    it."""
    digest = _hash(remote, part)
    first = before = _size(part)
    failures = 0
    while True:
        fault: HttpFault | Unreachable | None = None
        try:
            digest = _receive(remote, part, digest, received)
        except (HttpFault, Unreachable) as caught:
            fault = caught
        now = _size(part)
        if fault is None and (remote.size is None or now >= remote.size):
            return digest
        failures = 1 if now > before else failures + 1
        if failures > RETRIES or not _may_pass(fault, has_come=now > first):
            raise fault or Unreachable(f"{urlsplit(remote.url).hostname} ends the file before its last byte")
        before = now
        time.sleep(_pause(fault, failures))


def _may_pass(fault: HttpFault | Unreachable | None, *, has_come: bool) -> bool:
    """Says whether another attempt may end otherwise."""
    if isinstance(fault, HttpFault):
        return fault.status in BUSY
    return fault is None or has_come


def _pause(fault: HttpFault | Unreachable | None, failures: int) -> float:
    asked = fault.retry_after if isinstance(fault, HttpFault) else ""
    return min(MAX_PAUSE_S, float(asked) if asked.isdecimal() else 0.5 * 2 ** (failures - 1))


def _receive(remote: RemoteFile, part: Path, digest: Any, received: Received) -> Any:
    """Appends what one answer brings. Returns the hash of all that is there then."""
    done = _size(part)
    if done and done == remote.size:
        return digest
    headers = {**remote.headers, "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        answer = open_url(remote.url, headers)
    except HttpFault as fault:
        if fault.status != 416 or not done:
            raise
        if fault.range == f"bytes */{done}":
            return digest  # all of it was there
        part.unlink()  # longer than the file: that of another version
        return _receive(remote, part, _hash(remote, part), received)
    with answer, part.open("ab") as file:
        if done and not str(answer.headers.get("Content-Range", "")).startswith(f"bytes {done}-"):
            file.truncate(0)
            digest, done = _new_hash(remote), 0
        try:
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                received(done)
        except (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
            raise Unreachable(_reason(error, remote.url)) from None
        finally:
            file.flush()
            os.fsync(file.fileno())
    return digest


def _new_hash(remote: RemoteFile) -> Any:
    kind, _, _ = remote.digest.partition(":")
    if kind != "git":
        return hashlib.sha256()
    return hashlib.sha1(f"blob {remote.size}\0".encode(), usedforsecurity=False)


def _hash(remote: RemoteFile, part: Path) -> Any:
    """Returns the hash of what is there."""
    digest = _new_hash(remote)
    if _size(part):
        with part.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest


def _is_right(remote: RemoteFile, part: Path, digest: Any) -> bool:
    if remote.size is not None and _size(part) != remote.size:
        return False
    expected = remote.digest.partition(":")[2]
    return not expected or digest.hexdigest() == expected


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def require_room(folder: Path, needed: int) -> None:
    """Raises StartupError where the disk has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(
            f"it needs {size(needed)}, but only {size(free)} are free on the disk of {folder}; make room "
            "(tureen list, tureen rm NAME), or choose another --download-dir"
        )


def disk_fault(error: OSError, folder: Path) -> StartupError:
    """Returns the error for a folder in which files cannot be kept."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason, fix = "the disk is full", "make room (tureen list, tureen rm NAME), or choose another --download-dir"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        reason, fix = "it cannot be written", "choose another --download-dir"
    else:
        reason, fix = error.strerror or str(error), "see --download-dir"
    return StartupError(f"cannot keep models in {folder}: {reason}; {fix}")


def _reason(error: Exception, url: str) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception) else error
    parts = urlsplit(url)
    host, via = parts.hostname or url, _proxy_of(parts.scheme, parts.hostname or "")
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"the certificate of {host} is not trusted ({reason.verify_message}); set SSL_CERT_FILE"
    if via and isinstance(reason, OSError) and "Tunnel connection failed" in str(reason):
        return f"the proxy {via} does not connect to {host}: {excerpt(str(reason))}; see HTTPS_PROXY and NO_PROXY"
    who = f"the proxy {via} (HTTPS_PROXY) for {host}" if via else host
    if isinstance(reason, socket.gaierror):
        return f"the name of {who} does not resolve: no network or no DNS"
    if isinstance(reason, ConnectionRefusedError):
        return f"{who} refuses connections"
    if isinstance(reason, TimeoutError):
        return f"{who} does not answer within {TIMEOUT_S:.0f} s"
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return f"{who} cannot be reached: {excerpt(text)}"


def _proxy_of(scheme: str, host: str) -> str:
    """Returns the proxy in the way to a host, without the password that its URL may have; "" where there is none."""
    if urllib.request.proxy_bypass(host):
        return ""
    proxy = urllib.request.getproxies().get(scheme, "")
    return _without_credentials(proxy)[0] if proxy else ""


def _without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """Returns a URL without user and password, and the header that says them."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    user, _, host = parts.netloc.rpartition("@")
    plain = urlunsplit(parts._replace(netloc=host))
    return plain, {"Authorization": "Basic " + base64.b64encode(unquote(user).encode()).decode()}


def _trusted() -> ssl.SSLContext:
    """Returns the system's authorities, and those that pip and curl are told of."""
    named = (os.environ.get(name, "") for name in CERTIFICATES)
    return _trusting(tuple(dict.fromkeys(file for file in named if os.path.isfile(file))))


@functools.cache
def _trusting(files: tuple[str, ...]) -> ssl.SSLContext:
    """Reads authorities once for all connections: it takes longer than a request."""
    context = ssl.create_default_context()
    for file in files:
        if file != os.environ.get("SSL_CERT_FILE"):
            context.load_verify_locations(file)
    return context
