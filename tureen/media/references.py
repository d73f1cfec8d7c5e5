"""Classifies the strings in `image_data` and `video_data`. Nothing is opened, fetched or decoded here.

The first rule that fits decides:

1. `data:` – a data: URL, with base64.
2. `file:` – a file name; any other `scheme://` – a URL. Only http and https are fetched.
3. `/`, but not `/9j/`, with which every JPEG in base64 begins – a file name.
4. Longer than a file name can be, or nothing but base64's characters and white space – base64.
5. All else, such as what has a dot in it – a file name.

So a file whose name has only base64's characters, such as `dog`, is given as `./dog`.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from tureen.errors import Forbidden, InvalidRequest, echo

MAX_BYTES = 20 << 20
"""Most bytes of one picture or film, as it is stored."""

MAX_BASE64_CHARS = 28 << 20
"""Most characters of base64: room for MAX_BYTES with line breaks."""

MAX_NAME_CHARS = 4096
JPEG_IN_BASE64 = "/9j/"
BASE64 = re.compile(r"[A-Za-z0-9+/\s]*=?\s*=?\s*", re.ASCII)
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
FILE_URL = re.compile(r"file:(//(localhost)?(?=/))?", re.IGNORECASE)
MAX_HEAD_CHARS = 256
DATA_URL = re.compile(
    r"data:((image|video)/[\w.+-]+|application/octet-stream)?(;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE
)


class Inline(NamedTuple):
    """The picture itself. Whether it is in base64 is found out where it is decoded."""

    base64: str


class Remote(NamedTuple):
    """A picture at a URL."""

    url: str


class Local(NamedTuple):
    """A file on the server's machine."""

    name: str


Reference = Inline | Remote | Local


def parse_reference(text: str, field: str) -> Reference:
    """Classifies a string by the rules above. Raises InvalidRequest, Forbidden, under the client's name `field`."""
    head = text[:MAX_HEAD_CHARS]
    start = head[:5].lower()
    scheme = SCHEME.match(head)
    if start == "data:":
        return _inline(text, _data_start(head, field), field)
    if start == "file:":
        return Local(_file_name(text))
    if scheme is not None:
        return _remote(text, scheme[1].lower(), field)
    if text.startswith("/") and not text.startswith(JPEG_IN_BASE64):
        return Local(text)
    if len(text) > MAX_NAME_CHARS or BASE64.fullmatch(text):
        return _inline(text, 0, field)
    return Local(text)


def _data_start(head: str, field: str) -> int:
    match = DATA_URL.match(head)
    if match is None:
        raise InvalidRequest(
            f"{field} begins {echo(head[:40])}: a data: URL begins data:image/TYPE;base64, or data:video/TYPE;base64,",
            field=field,
            code="invalid_image",
        )
    return match.end()


def _inline(text: str, start: int, field: str) -> Inline:
    size = len(text) - start
    if size > MAX_BASE64_CHARS:
        fault = f"{field} has {size} characters of base64"
        raise InvalidRequest(
            f"{fault}; a picture may have {MAX_BYTES >> 20} MiB: {MAX_BASE64_CHARS} characters",
            field=field,
            code="invalid_image",
        )
    if text[start:].isspace() or size == 0:
        raise InvalidRequest(
            f"{field} is empty; give a data: URL, base64, an http(s) URL or a file name",
            field=field,
            code="invalid_image",
        )
    return Inline(text[start:])


def _remote(text: str, scheme: str, field: str) -> Remote:
    if scheme not in ("http", "https"):
        raise Forbidden(
            f"{field} is a URL that begins {echo(scheme + ':')}; only http and https are fetched",
            field=field,
            code="media_url_forbidden",
        )
    return Remote(text)


def _file_name(text: str) -> str:
    """Returns the file name of a file: URL. A name that is too long anyway may be cut off."""
    path = text[: 3 * (MAX_NAME_CHARS + MAX_HEAD_CHARS)]
    match = FILE_URL.match(path)
    return unquote(path[match.end() :] if match else path)
