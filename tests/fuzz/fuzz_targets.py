"""What strangers' bytes go through first. Each target raises only what stands for a refusal."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tureen.errors import TureenError
from tureen.grammar.base import GrammarSpec
from tureen.grammar.expression import GrammarError
from tureen.grammar.frontends import language_of
from tureen.media.decode import Refused, decode
from tureen.requests.body import read_json
from tureen.weights.gguf import GgufFile
from tureen.weights.safetensors import SafetensorsFile

REFUSALS = (TureenError, GrammarError, Refused, msgspec.ValidationError)
CORPUS = Path(__file__).parent / "corpus"


def _body(data: bytes) -> None:
    read_json("application/json", data)


def _spec(kind: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        language_of(GrammarSpec(kind, data.decode("utf-8", "ignore")))

    return run


def _file(kind: Callable[[Path], object], name: str) -> Callable[[bytes], None]:
    folder = Path(tempfile.gettempdir())

    def run(data: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=name, dir=folder) as file:
            file.write(data)
            file.flush()
            kind(Path(file.name))

    return run


TARGETS: dict[str, Callable[[bytes], None]] = {
    "body": _body,
    "schema": _spec("json_schema"),
    "regex": _spec("regex"),
    "gguf": _file(GgufFile, ".gguf"),
    "safetensors": _file(SafetensorsFile, ".safetensors"),
    "picture": lambda data: decode(data) and None,
}


def run(name: str, data: bytes) -> None:
    """Raises what is no refusal."""
    with contextlib.suppress(*REFUSALS):
        TARGETS[name](data)
