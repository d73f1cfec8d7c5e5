"""What strangers' bytes go through first. Each target raises only what stands for a refusal."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import adapter_target
import connection_target
import msgspec
import processor_target
import route_target
import template_target

from tureen.errors import TureenError
from tureen.grammar.base import GrammarSpec, Kind
from tureen.grammar.expression import GrammarError
from tureen.grammar.frontends import language_of
from tureen.media.decode import Refused, decode
from tureen.weights.gguf import GgufFile
from tureen.weights.onnx_file import OnnxFile
from tureen.weights.safetensors import SafetensorsFile
from tureen.weights.stored import Stored, readable, to_float32

REFUSALS = (TureenError, GrammarError, Refused, msgspec.ValidationError)
MOST_TENSORS, MOST_VALUES = 32, 1 << 12
CORPUS = Path(__file__).parent / "corpus"


def _spec(kind: Kind) -> Callable[[bytes], None]:
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


def _gguf(path: Path) -> None:
    """Read the header, and the values of the first tensors."""
    file = GgufFile(path)
    for info in list(file.tensors.values())[:MOST_TENSORS]:
        if info.num_elements <= MOST_VALUES:
            to_float32(readable(Stored(info.name, info.shape, info.encoding.name, file.raw(info))))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "connection": connection_target.run,
    "route": route_target.run,
    "schema": _spec("json_schema"),
    "regex": _spec("regex"),
    "ebnf": _spec("ebnf"),
    "structural_tag": _spec("structural_tag"),
    "template": template_target.run,
    "processor_field": processor_target.field,
    "processor": processor_target.pickle,
    "adapter": adapter_target.run,
    "gguf": _file(_gguf, ".gguf"),
    "safetensors": _file(SafetensorsFile, ".safetensors"),
    "onnx": _file(OnnxFile, ".onnx"),
    "picture": lambda data: decode(data) and None,
}


def run(name: str, data: bytes) -> None:
    """Raises what is no refusal."""
    with contextlib.suppress(*REFUSALS):
        TARGETS[name](data)


def close() -> None:
    """End what targets have started; they are of no use afterwards."""
    route_target.HELD.close()
    processor_target.HELD.close()
