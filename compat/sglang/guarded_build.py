"""Builds the distribution unless the real SGLang is installed: its files would lie over the real ones.

pip builds in an environment of its own, so the folder of the Python that it builds for is looked at too.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import distributions
from typing import Any

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import build_editable as _build_editable
from setuptools.build_meta import build_wheel as _build_wheel


def build_wheel(*args: Any, **options: Any) -> str:
    _refuse_beside_sglang()
    return _build_wheel(*args, **options)


def build_editable(*args: Any, **options: Any) -> str:
    _refuse_beside_sglang()
    return _build_editable(*args, **options)


def _refuse_beside_sglang() -> None:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for search in ({}, {"path": folders}):
        if any(True for _ in distributions(name="sglang", **search)):
            raise SystemExit(
                "tureen-sglang: SGLang is installed here, and this would write over its files; install it in another "
                "environment, or run `python -m tureen.launch_server`, which takes the same flags"
            )
