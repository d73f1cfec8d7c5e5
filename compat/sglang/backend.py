"""Builds the distribution with setuptools, unless the real SGLang is installed: its files would be overwritten."""

from __future__ import annotations

import sysconfig
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta

OWN = "tureen-sglang"


def check() -> None:
    """Raises SystemExit where another distribution has a package `sglang`.

    It looks where pip installs to, which the isolated build does not import from.
    """
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for distribution in distributions(path=list(dict.fromkeys(places))):
        name = distribution.metadata["Name"]
        if name != OWN and (name.lower() == "sglang" or "sglang/__init__.py" in map(str, distribution.files or ())):
            raise SystemExit(
                f"{OWN} is not installed over {name} {distribution.version}, whose files it would overwrite: "
                f"pip uninstall {name}, or use another environment"
            )


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    check()
    return build_meta.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    check()
    return build_meta.build_editable(directory, settings, metadata)


def build_sdist(directory: str, settings: Any = None) -> str:
    return build_meta.build_sdist(directory, settings)
