"""Finds a plug-in by what its file declares, and imports only that file.

Imports: errors, transformers_classes.
Imported by: all.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tureen import transformers_classes
from tureen.errors import StartupError, echo


def find_model(architecture: str) -> ModuleType:
    """Imports the module of `tureen.models` that lists the architecture. Raises StartupError naming the known ones."""
    module = declaring("tureen.models", "ARCHITECTURES", architecture)
    if module is None:
        raise unsupported(architecture)
    return importlib.import_module(module)


def unsupported(architecture: str) -> StartupError:
    """Returns the error for a config.json with this architecture; "" if it names none."""
    known = f"this version serves {', '.join(sorted(declared('tureen.models', 'ARCHITECTURES')))}"
    if not architecture:
        return StartupError(f"architecture (none in config.json) is not supported; {known}")
    return StartupError(
        f"architecture {echo(architecture)} is not supported; {transformers_classes.advice(architecture)}; {known}",
        field="model_path",
    )


def other_way(architecture: str) -> str:
    """Returns what to do with a GGUF file whose model config.json would call by this architecture."""
    if declaring("tureen.models", "ARCHITECTURES", architecture) is not None:
        return "safetensors of this model run: give their folder, or ORG/NAME of the hub"
    return f"with its safetensors, {transformers_classes.advice(architecture)}"


def find_encoder(architecture: str) -> ModuleType:
    """Imports the module of `tureen.models` that lists the encoder, which must be there."""
    return importlib.import_module(declared("tureen.models", "ENCODER_ARCHITECTURES")[architecture])


def find_text_model(model_type: object) -> ModuleType:
    """Imports the module of `tureen.models` whose TEXT_DEFAULTS has the type: that of a text model inside a larger one.

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
    """Imports the module of `tureen.weights` that lists the method in METHODS. Raises StartupError naming the known
    ones."""
    known = declared("tureen.weights", "METHODS")
    if not isinstance(method, str) or method not in known:
        raise StartupError(
            f"config.json: quantization_config: quant_method: {echo(method)} is not supported; "
            f"known: {', '.join(sorted(known))}; use one of these, or a GGUF file",
            field="quantization_config",
        )
    return importlib.import_module(known[method])


def find_dialects() -> list[ModuleType]:
    """Imports the module `dialect` of each folder of tureen.dialects, in which an API says what it is."""
    package = "tureen.dialects"
    folders = importlib.import_module(package).__path__
    names = sorted({path.parent.name for folder in folders for path in Path(folder).glob("*/dialect.py")})
    return [importlib.import_module(f"{package}.{name}.dialect") for name in names]


def declared(package: str, constant: str) -> dict[str, str]:
    """Returns the names in the tuple (or dict) `constant` of each file of the package -> the module. Reads the source;
    runs nothing."""
    return {name: module for module, text in _sources(package) for name in _constant(text, constant)}


def declaring(package: str, constant: str, name: object) -> str | None:
    """Returns the module that `declared` has for a name, or None. Parses only the files that mention the name."""
    if not isinstance(name, str):
        return None
    names = (module for module, text in _sources(package) if f'"{name}"' in text and name in _constant(text, constant))
    return next(names, None)


def _sources(package: str) -> Iterator[tuple[str, str]]:
    """Yields each module of the package, and its source."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.py")):
            yield f"{package}.{path.stem}", path.read_text(encoding="utf-8")


def _constant(text: str, constant: str) -> tuple[str, ...]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == constant for t in node.targets):
            value: tuple[str, ...] = ast.literal_eval(node.value)
            return value
    return ()
