"""Reads API keys from flags and files, finds the key in a request, and decides which routes it opens."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from typing import Annotated

import msgspec
from msgspec import Meta

from tureen.config import Config
from tureen.errors import Forbidden, StartupError, TureenError, Unauthorized, echo
from tureen.files import NotRegular, open_regular

SCHEME = b"Bearer "
MAX_FILE_BYTES = 1 << 20
MAX_NAME_CHARS = 64


class Limits(msgspec.Struct, frozen=True):
    """Limits of one client; None = the limit that the settings have for all clients."""

    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # share of the engine while several clients wait


NO_LIMITS = Limits()


class Key(msgspec.Struct, frozen=True):
    """An API key. `digest`: its SHA-256; `name`: its client, "" for a key from a flag, which many clients share."""

    digest: bytes
    name: str
    is_admin: bool
    limits: Limits = NO_LIMITS


class Keys(msgspec.Struct, frozen=True):
    """All API keys of a server. `for_users`: whether user routes need a key."""

    keys: tuple[Key, ...]
    for_users: bool

    def find(self, authorization: bytes) -> Key | None:
        """Returns the key in an Authorization header (`Bearer KEY`), None when it has no valid one.

        Compares with every key in constant time, so timing reveals nothing about the keys.
        """
        scheme, presented = authorization[: len(SCHEME)], authorization[len(SCHEME) :]
        presented_digest = hashlib.sha256(presented).digest()
        match = None
        for key in self.keys:
            if hmac.compare_digest(presented_digest, key.digest):
                match = key
        return match if scheme.lower() == SCHEME.lower() else None

    def user_refusal(self, key: Key | None, authorization: bytes) -> TureenError | None:
        """Return the error for a caller that may not call a user route; None = it may. `key`: the one that `find` found
        in the Authorization header."""
        if key is None and self.for_users:
            return Unauthorized(_why_refused(authorization, "this server needs an API key"))
        return None

    def admin_refusal(self, key: Key | None, authorization: bytes, *, is_local: bool) -> TureenError | None:
        """Return the error for a caller that may not call an admin route; None = it may. `key`: as for `user_refusal`.

        `is_local`: the caller is on this machine, and is not a page of another site.
        """
        if key is not None:
            return (
                None if key.is_admin else Forbidden("this needs the admin key of the server", code="admin_key_needed")
            )
        if self.keys:
            return Unauthorized(_why_refused(authorization, "this needs the server's admin key"))
        if is_local:
            return None
        return Forbidden(
            "without keys this is only for callers on the server's own machine, and not for pages of other origins; "
            "start the server with --admin-api-key",
            code="admin_key_needed",
        )


def _why_refused(authorization: bytes, needed: str) -> str:
    """Return the message for an Authorization header without a valid key. b"" = no header."""
    if not authorization:
        return f"{needed}; send the header 'Authorization: Bearer KEY'"
    if authorization[: len(SCHEME)].lower() != SCHEME.lower():
        return f"{needed}, but the header Authorization is not of the form 'Bearer KEY'"
    return f"{needed}, and the key that was sent is wrong; check it for typos"


def load_keys(config: Config) -> Keys:
    """Reads the keys of the settings and of --api-key-file. Raises StartupError naming the flag, file and line."""
    keys: dict[bytes, Key] = {}
    if config.admin_api_key is not None:
        _add(keys, "--admin-api-key", config.admin_api_key, is_admin=True)
    if config.api_key is not None:
        _add(keys, "--api-key", config.api_key, is_admin=config.admin_api_key is None)
    if config.api_key_file is not None:
        _add_file(keys, config.api_key_file)
    return Keys(tuple(keys.values()), config.api_key is not None or config.api_key_file is not None)


def _add(
    keys: dict[bytes, Key],
    where: str,
    key: str,
    *,
    name: str = "",
    is_admin: bool = False,
    limits: Limits = NO_LIMITS,
) -> None:
    if not key or not all(char.isprintable() and char != " " for char in key):
        raise StartupError(f"{where}: the key must have at least one character, all printable, without spaces")
    digest = hashlib.sha256(key.encode()).digest()
    if digest in keys:
        raise StartupError(f"{where}: this key occurs twice; every key must be unique")
    keys[digest] = Key(digest, name, is_admin, limits)


def _add_file(keys: dict[bytes, Key], path: str) -> None:
    flag = f"--api-key-file {path}"
    try:
        lines = read_secret("--api-key-file", path).decode().splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"{flag}: it is not UTF-8 text") from None
    names = set()
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"{flag}, line {number}"
        if len(fields) < 2 or any("=" not in field for field in fields[2:]):
            raise StartupError(f"{where}: a line must be NAME KEY [SETTING=NUMBER …]; got {len(fields)} words")
        name, key, *settings = fields
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise StartupError(f"{where}: a name has at most {MAX_NAME_CHARS} printable characters")
        if name in names:
            raise StartupError(f"{where}: the name {echo(name)} occurs twice")
        names.add(name)
        _add(keys, where, key, name=name, limits=_limits(settings, where))
    if not names:
        raise StartupError(f"{flag}: it has no keys; write one NAME KEY a line")


def _limits(settings: list[str], where: str) -> Limits:
    """Reads the SETTING=NUMBER words after NAME KEY. Errors do not show a wrong word, which may be part of a key."""
    values: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in Limits.__struct_fields__:
            allowed = ", ".join(f"{field}=NUMBER" for field in Limits.__struct_fields__)
            raise StartupError(f"{where}: after the key may follow {allowed}; got something else")
        if name in values:
            raise StartupError(f"{where}: {name} occurs twice")
        values[name] = value
    try:
        return msgspec.convert(values, Limits, strict=False)
    except msgspec.ValidationError as error:
        raise StartupError(f"{where}: {error}".replace("`$.", "`")) from None


def read_file(flag: str, path: str) -> bytes:
    """Reads a regular file of at most 1 MiB. Raises StartupError naming `flag` and `path`."""
    return _read(flag, path)[0]


def read_secret(flag: str, path: str) -> bytes:
    """Reads a file as `read_file` does. Also raises StartupError if every user of the machine may read or change it."""
    content, status = _read(flag, path)
    if status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise StartupError(f"{flag} {path}: every user of this machine may read or change it; run chmod 600 on it")
    return content


def _read(flag: str, path: str) -> tuple[bytes, os.stat_result]:
    """Returns content and status of the same open file, so that the permissions are those of what was read."""
    try:
        with open_regular(path) as file:
            content, status = file.read(MAX_FILE_BYTES + 1), os.fstat(file.fileno())
    except NotRegular as error:
        raise StartupError(f"{flag} {path}: {error.strerror}") from None
    except OSError as error:
        raise StartupError(f"{flag} {path}: cannot read it: {error.strerror}") from None
    except ValueError:
        raise StartupError(f"{flag} {echo(path)}: this is not a valid file name") from None
    if not content or len(content) > MAX_FILE_BYTES:
        raise StartupError(f"{flag} {path}: it is {'larger than 1 MiB' if content else 'empty'}")
    return content, status
