"""Find a plug-in by what its file declares, and import only that file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from tureen.errors import StartupError


def find_model(architecture: str) -> ModuleType:
    """The module of `tureen.models` that lists the architecture. Raises StartupError naming the known ones."""
    known = declared("tureen.models", "ARCHITECTURES")
    if architecture not in known:
        raise StartupError(
            f"architecture {architecture or '(none in config.json)'} is not supported; "
            f"this version serves {', '.join(sorted(known))}"
        )
    return importlib.import_module(known[architecture])


def declared(package: str, constant: str) -> dict[str, str]:
    """Names in the tuple `constant` of each file of the package -> module; read from the source, not imported."""
    spec = importlib.util.find_spec(package)
    found: dict[str, str] = {}
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.py")):
            found |= dict.fromkeys(_constant(path, constant), f"{package}.{path.stem}")
    return found


def _constant(path: Path, constant: str) -> tuple[str, ...]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == constant for t in node.targets):
            value: tuple[str, ...] = ast.literal_eval(node.value)
            return value
    return ()
