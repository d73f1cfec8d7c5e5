"""The grammar backends by name."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tureen.errors import StartupError, echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from tureen.grammar.base import Backend, Encode, Vocabulary


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend that can be chosen."""

    module: str
    name: str  # of its class there
    needs: tuple[str, ...]  # top-level modules of the packages that it uses
    install: str  # what to type where they are missing
    version: str | None = None  # required version of the first package, if only one works


XGRAMMAR = "0.2.9"  # any release may change the compiled classes we call

BACKENDS = {
    "llguidance": BackendEntry(
        "tureen.grammar.backends.llguidance", "LlguidanceBackend", ("llguidance",), "pip install llguidance"
    ),
    "xgrammar": BackendEntry(
        "tureen.grammar.backends.xgrammar",
        "XgrammarBackend",
        ("xgrammar", "tvm_ffi"),
        f"pip install --no-deps xgrammar=={XGRAMMAR} apache-tvm-ffi",
        XGRAMMAR,
    ),
    "outlines": BackendEntry(
        "tureen.grammar.backends.outlines", "OutlinesBackend", ("outlines_core",), "pip install outlines_core"
    ),
}


def find_backend(name: str) -> Callable[[Vocabulary, Encode], Backend]:
    """Returns the backend's class, its module imported. Raises StartupError when it is unknown or its packages are
    missing or of another version."""
    check_backend(name)
    entry = BACKENDS[name]
    backend: Callable[[Vocabulary, Encode], Backend] = getattr(importlib.import_module(entry.module), entry.name)
    return backend


def check_backend(name: str) -> None:
    """Imports nothing. Raises StartupError when it is unknown, or its packages are missing or of another version."""
    entry = BACKENDS.get(name)
    if entry is None:
        raise StartupError(f"--grammar-backend is {echo(name)}; choose one of {', '.join([*BACKENDS, 'none'])}")
    missing = [module for module in entry.needs if importlib.util.find_spec(module) is None]
    if missing:
        problem = f"needs {' and '.join(missing)}, which is not installed"
    elif entry.version and (installed := _installed(entry.needs[0])) != entry.version:
        problem = f"needs {entry.needs[0]} {entry.version}, but {installed} is installed"
    else:
        return
    others = [other for other in BACKENDS if other != name]
    raise StartupError(
        f"--grammar-backend {name} {problem}; type: {entry.install} (or choose {' or '.join(others)}, or none)"
    )


def _installed(package: str) -> str:
    metadata = importlib.import_module("importlib.metadata")  # the default backend does not need it
    try:
        return str(metadata.version(package)).partition("+")[0]  # without the label of a local build
    except metadata.PackageNotFoundError:
        return "an unknown version"
