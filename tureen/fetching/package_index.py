"""Finds a wheel as pip would: by the same settings, in package indexes (PEP 503, PEP 691) and folders of wheels."""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from tureen.fetching.download import HttpFault, RemoteFile, Unreachable, read_url

PYPI: Final = "https://pypi.org/simple"
ACCEPT: Final = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1, */*;q=0.01"
)
ENDS: Final = re.compile(r"(\.0)+$")


class Places(NamedTuple):
    """The places where pip looks: URLs of indexes, folders or pages with wheels."""

    indexes: tuple[str, ...]
    links: tuple[str, ...]


class _Links(HTMLParser):
    """The addresses that a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if tag == "a" and name == "href" and value]


def find_wheel(name: str, version: str, sha256: str | None) -> RemoteFile | None:
    """Returns the wheel of a package, by its normalised name; that with the digest, where one is asked for.

    None where no place has one, whatever the platform is that it is for. Raises HttpFault, Unreachable where none has
    it and a place could not be asked.
    """
    places = pip_places()
    fault: HttpFault | Unreachable | None = None
    wheels: list[RemoteFile] = []
    for where in (*places.links, *(f"{index.rstrip('/')}/{name}/" for index in places.indexes)):
        try:
            wheels += [file for file in _files(where) if _is_of(file, name, version)]
        except HttpFault as refusal:
            fault = fault if refusal.status in (404, 410) else refusal
        except Unreachable as unreachable:
            fault = fault if where.startswith("file:") else unreachable
        right = [wheel for wheel in wheels if sha256 is None or wheel.digest in ("", f"sha256:{sha256}")]
        if right:
            return min(right, key=lambda wheel: "-none-any." not in wheel.url)
    if wheels:
        return wheels[0]  # not the one that is wanted: its digest will say so
    if fault is not None:
        raise fault
    return None


def pip_places(environment: Mapping[str, str] | None = None) -> Places:
    """Returns the places that pip's variables and files name; PyPI where they name no index."""
    environment = os.environ if environment is None else environment
    settings = {**_from_files(environment), **_from_variables(environment)}
    links = tuple(settings.get("find-links", "").split())
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return Places((), links)
    indexes = [settings.get("index-url") or PYPI, *settings.get("extra-index-url", "").split()]
    return Places(tuple(indexes), links)


def _from_variables(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("index-url", "extra-index-url", "find-links", "no-index")
    values = {name: environment.get(f"PIP_{name.replace('-', '_').upper()}") for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _from_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of pip's files, of which later ones win."""
    own = environment.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return {}
    home = Path(environment.get("HOME", "~")).expanduser()
    user = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    shared = (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    files = [*(Path(folder, "pip", "pip.conf") for folder in shared), Path("/etc/pip.conf")]
    files += [home / ".pip" / "pip.conf", user / "pip" / "pip.conf", Path(sys.prefix, "pip.conf")]
    parser = configparser.RawConfigParser()
    try:
        parser.read([*files, *([own] if own else [])], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    sections = [parser[name] for name in ("global", "download") if parser.has_section(name)]
    return {name.replace("_", "-"): value for section in sections for name, value in section.items()}


def _files(where: str) -> Iterator[RemoteFile]:
    """Yields the files of a folder of wheels, or of a page."""
    folder = Path(where).expanduser()
    if "://" not in where:
        if folder.is_file():
            yield RemoteFile(folder.resolve().as_uri())
        for path in sorted(folder.glob("*.whl")):
            yield RemoteFile(path.resolve().as_uri(), path.stat().st_size)
        return
    if where.startswith("file:"):
        path = Path(unquote(urlsplit(where).path))
        if path.is_dir() and not (path / "index.html").exists():
            yield from _files(str(path))
            return
        where = urljoin(where if where.endswith("/") else where + "/", "index.html") if path.is_dir() else where
    page, kind = read_url(where, {"Accept": ACCEPT})
    yield from _of_json(where, page) if kind.endswith("json") else _of_html(where, page)


def _of_json(where: str, page: bytes) -> Iterator[RemoteFile]:
    try:
        files: list[dict[str, Any]] = json.loads(page)["files"]
        for file in files:
            sha256 = file.get("hashes", {}).get("sha256")
            size = file.get("size")
            known = size if isinstance(size, int) else None
            yield RemoteFile(urljoin(where, file["url"]), known, f"sha256:{sha256}" if sha256 else "")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreachable(f"{urlsplit(where).hostname} does not answer like a package index") from None


def _of_html(where: str, page: bytes) -> Iterator[RemoteFile]:
    links = _Links()
    links.feed(page.decode("utf-8", "replace"))
    for address in links.addresses:
        url, fragment = urldefrag(urljoin(where, address))
        kind, _, digest = fragment.partition("=")
        yield RemoteFile(url, None, f"sha256:{digest}" if kind == "sha256" else "")


def _is_of(file: RemoteFile, name: str, version: str) -> bool:
    """Says whether a file is a wheel of this package and version."""
    parts = unquote(urlsplit(file.url).path).rpartition("/")[2].removesuffix(".whl").split("-")
    if not file.url.endswith(".whl") or len(parts) not in (5, 6):
        return False
    return re.sub(r"[-_.]+", "-", parts[0]).lower() == name and _plain(parts[1]) == _plain(version)


def _plain(version: str) -> str:
    """Returns a version without what makes no difference (PEP 440): case, a leading v, zeros at the end."""
    release, plus, local = version.lower().removeprefix("v").partition("+")
    return ENDS.sub("", release) + plus + local
