"""The program of a child process that reads the files of an adapter or a model, and ends. serving/dry_run.py starts it,
and sends the order as JSON to its standard input."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tureen.config import Config
from tureen.fetching import names
from tureen.fetching.pull import find_here
from tureen.log import no_progress
from tureen.lora.adapter import read_adapter
from tureen.runner.loading import describe, weights
from tureen.sandbox.limits import be_expendable
from tureen.weights.source import load_tokenizer, model_config, open_model


def main() -> None:
    """Does the order of standard input. The exit status is 0 whatever a reader raises: the engine raises it again."""
    be_expendable()
    with contextlib.suppress(Exception):
        read(json.load(sys.stdin))


def read(order: Mapping[str, Any]) -> None:
    """Reads the files that an order names, as the engine will. Raises what their reader raises."""
    if order["op"] == "load_adapter":
        _read_adapter(order)
    else:
        _read_weights(order)


def _read_adapter(order: Mapping[str, Any]) -> None:
    settings = Config(download_dir=order["download_dir"], revision=order["revision"])
    model = find_here(names.parse(order["model_path"]), settings)
    if model is not None:
        read_adapter(order["path"], describe(model_config(open_model(model))))


def _read_weights(order: Mapping[str, Any]) -> None:
    """Reads all but the numbers: these take time in proportion to their bytes, in pieces."""
    source = open_model(Path(order["path"]))
    hf = model_config(source)
    with contextlib.suppress(Exception):  # a model may have none, where the server keeps its own
        load_tokenizer(source)
    if order["load_format"] != "dummy":
        for _ in weights(source, hf, describe(hf), load_format=order["load_format"], progress=no_progress):
            pass


if __name__ == "__main__":
    main()
