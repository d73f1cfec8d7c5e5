"""The program of a child process that reads the files of an adapter or a model, and ends. serving/dry_run.py starts it,
and sends the order as JSON to its standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tureen.config import Config
from tureen.config_facts import adapter_of
from tureen.fetching import names
from tureen.fetching.pull import find_here
from tureen.log import no_progress
from tureen.lora.adapter import read_adapter
from tureen.media.families import sees
from tureen.runner import embedder, encoder, heads
from tureen.runner.kinds import is_encoder
from tureen.runner.loading import describe, weights
from tureen.sandbox.expendable import OUT_OF_MEMORY, begin
from tureen.weights.source import ModelSource, load_tokenizer, model_config, open_model


def main() -> None:
    """Does the order of standard input. The exit status is 0 if a reader raises: the engine raises it again."""
    begin()
    try:
        read(json.load(sys.stdin))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


def read(order: Mapping[str, Any]) -> None:
    """Reads the files that an order names, as the engine will. Raises MemoryError; ignores faults of the files."""
    readers = {"load_adapter": _read_adapter, "update_weights": _read_weights, "load_model": _read_model}
    with _left_to_the_engine():
        readers[order["op"]](order["path"], msgspec.convert(order["config"], Config))


def _read_adapter(path: str, config: Config) -> None:
    model = find_here(names.parse(config.model_path), config)
    if model is not None:
        read_adapter(path, describe(model_config(open_model(model))))


def _read_weights(path: str, config: Config) -> None:
    """Reads what a model needs to take the place of the one that is served, which keeps its vision encoder."""
    source = open_model(Path(path))
    with _left_to_the_engine():
        load_tokenizer(source, config.tokenizer_path)
    hf = model_config(source)
    _read_all(weights(source, hf, describe(hf), load_format=config.load_format, progress=no_progress))


def _read_model(path: str, config: Config) -> None:
    """Reads what an engine reads at its start."""
    source = open_model(Path(path), config)
    with _left_to_the_engine():
        load_tokenizer(source, config.tokenizer_path)
    hf = model_config(source)
    if is_encoder(hf):
        _read_encoder(source)
        return
    _read_vision(source, hf, config)
    model = describe(hf)
    with _left_to_the_engine():
        _read_all(weights(source, hf, model, load_format=config.load_format, progress=no_progress))
    with _left_to_the_engine():
        heads.layers_of(source, model.hidden_size)
    for setting in config.lora_paths:
        with _left_to_the_engine():
            read_adapter(adapter_of(setting)[1], model)


def _read_encoder(source: ModelSource) -> None:
    """Reads a model that makes embeddings or scores."""
    described = embedder.describe(source)
    with _left_to_the_engine():
        _read_all(embedder.weights(source, described, no_progress))
    if not described.shape.head:
        heads.dense_layers(source, described.shape.hidden_size)


def _read_vision(source: ModelSource, hf: Mapping[str, Any], config: Config) -> None:
    """Reads the preprocessor's config and the vision encoder of a model that takes pictures here."""
    with _left_to_the_engine():
        if sees(hf, config):
            _read_all(encoder.weights(source, encoder.describe(source, hf), config.load_format, no_progress))


def _read_all(tensors: Iterable[object]) -> None:
    """Reads all but the numbers: these take time in proportion to their bytes, in pieces."""
    for _ in tensors:
        pass


@contextmanager
def _left_to_the_engine() -> Iterator[None]:
    """Ignores what readers raise for wrong files: the engine raises it, too, in words for the client. Lets MemoryError
    pass."""
    try:
        yield
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - an edge: any reader of any format runs here
        pass


if __name__ == "__main__":
    main()
