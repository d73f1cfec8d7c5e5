"""Wheels for tests, and a package index that is a folder."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(index: Path, name: str, files: Mapping[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts, holding `files` beside its metadata."""
    index.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = index / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel
