"""Find a plug-in by what its file declares, and import only that file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from tureen.errors import StartupError, echo


def find_model(architecture: str) -> ModuleType:
    """The module of `tureen.models` that lists the architecture. Raises StartupError naming the known ones."""
    known = declared("tureen.models", "ARCHITECTURES")
    if architecture not in known:
        raise StartupError(
            f"architecture {architecture or '(none in config.json)'} is not supported; "
            f"this version serves {', '.join(sorted(known))}"
        )
    return importlib.import_module(known[architecture])


def find_text_model(model_type: object) -> ModuleType:
    """The module of `tureen.models` whose TEXT_DEFAULTS has the type: a text model that others have inside.

    Raises StartupError naming the known ones.
    """
    known = declared("tureen.models", "TEXT_DEFAULTS")
    if not isinstance(model_type, str) or model_type not in known:
        raise StartupError(
            f"config.json: text_config: model_type: {echo(model_type)} is not supported; known: "
            f"{', '.join(sorted(known))}",
            field="text_config",
        )
    return importlib.import_module(known[model_type])


def find_quantisation(method: object) -> ModuleType:
    """The module of `tureen.weights` that lists the method in METHODS. Raises StartupError naming the known ones."""
    known = declared("tureen.weights", "METHODS")
    if not isinstance(method, str) or method not in known:
        raise StartupError(
            f"config.json: quantization_config: quant_method: {echo(method)} is not supported; "
            f"known: {', '.join(sorted(known))}; use one of these, or a GGUF file",
            field="quantization_config",
        )
    return importlib.import_module(known[method])


def declared(package: str, constant: str) -> dict[str, str]:
    """Names in the tuple (or dict) `constant` of each file of the package -> module; read from the source, not run."""
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
