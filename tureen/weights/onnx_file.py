"""Reads the weights and the nodes of an ONNX model. No torch, no protobuf library.

An ONNX file is one protocol-buffers message (onnx/onnx.proto): a sequence of fields, each a number and a wire type
packed into a varint, then the value. The weights' values are raw little-endian bytes in it, so that it can be mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tureen.errors import StartupError, echo
from tureen.weights.mapped import MAX_SIZE, MappedFile, TensorEncoding, TensorInfo, num_elements, unusable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
FIXED_BYTES: Final = {FIXED64: 8, FIXED32: 4}
MODEL_GRAPH = 7
GRAPH_NODE, GRAPH_INITIALIZER = 1, 5
NODE_INPUT, NODE_NAME = 1, 3
TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, TENSOR_RAW = 1, 2, 8, 9
ENCODINGS: Final = {
    1: TensorEncoding("F32", 1, 4),
    6: TensorEncoding("I32", 1, 4),
    7: TensorEncoding("I64", 1, 8),
    9: TensorEncoding("BOOL", 1, 1),
    10: TensorEncoding("F16", 1, 2),
    11: TensorEncoding("F64", 1, 8),
    16: TensorEncoding("BF16", 1, 2),
}
MAX_VARINT: Final = 10  # bytes
MAX_DIMS: Final = 8


class OnnxNode(NamedTuple):
    """A node of the graph: its name and its inputs."""

    name: str
    inputs: tuple[str, ...]  # names of tensors and of other nodes' outputs


class _Field(NamedTuple):
    """A varint's value and nothing else, or where the value's bytes are."""

    number: int
    value: int
    start: int
    end: int


class OnnxFile(MappedFile):
    """An open ONNX file. Raises StartupError naming the file and the fault. tensors: the initialisers by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.nodes: list[OnnxNode] = []
        for part in self._fields(0, len(self._map)):
            if part.number == MODEL_GRAPH:
                self._read_graph(part)
        if not self.tensors:
            raise self._corrupt("it holds no weights")

    def _read_graph(self, graph: _Field) -> None:
        for part in self._fields(graph.start, graph.end):
            if part.number == GRAPH_NODE:
                self.nodes.append(self._node(part))
            elif part.number == GRAPH_INITIALIZER:
                info = self._tensor(part)
                self.tensors[info.name] = info

    def _node(self, node: _Field) -> OnnxNode:
        name, inputs = "", []
        for part in self._fields(node.start, node.end):
            if part.number == NODE_NAME:
                name = self._text(part)
            elif part.number == NODE_INPUT:
                inputs.append(self._text(part))
        return OnnxNode(name, tuple(inputs))

    def _tensor(self, tensor: _Field) -> TensorInfo:
        name, shape, kind, raw = "", [], 0, None
        for part in self._fields(tensor.start, tensor.end):
            if part.number == TENSOR_NAME:
                name = self._text(part)
            elif part.number == TENSOR_TYPE:
                kind = part.value
            elif part.number == TENSOR_DIMS:
                shape += self._counts(part)
                if len(shape) > MAX_DIMS or any(size > MAX_SIZE for size in shape):
                    raise self._corrupt(f"the tensor at byte {tensor.start} has an impossible shape")
            elif part.number == TENSOR_RAW:
                raw = part
        encoding = ENCODINGS.get(kind)
        if encoding is None or raw is None:
            where = "outside its raw data" if encoding else f"of type {kind}"
            raise StartupError(f"model {self.path}: tensor {echo(name)} has values {where}, which cannot be read")
        if raw.end - raw.start != num_elements(shape) * encoding.num_bytes:
            raise self._corrupt(
                f"tensor {echo(name)}: {raw.end - raw.start} bytes do not hold {encoding.name} of shape {shape}"
            )
        return TensorInfo(name, tuple(shape), encoding, raw.start, raw.end - raw.start)

    def _counts(self, part: _Field) -> list[int]:
        """Reads a repeated integer: one value, or several packed into one field."""
        if part.start == part.end:
            return [part.value]
        counts: list[int] = []
        at = part.start
        while at < part.end and len(counts) <= MAX_DIMS:
            value, at = self._varint(at, part.end)
            counts.append(value)
        return counts

    def _text(self, part: _Field) -> str:
        try:
            return self._map[part.start : part.end].decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"the name at byte {part.start} is not UTF-8") from None

    def _fields(self, at: int, end: int) -> Iterator[_Field]:
        while at < end:
            key, at = self._varint(at, end)
            number, wire = key >> 3, key & 7
            if wire == VARINT:
                value, at = self._varint(at, end)
                yield _Field(number, value, at, at)
                continue
            if wire == BYTES:
                length, at = self._varint(at, end)
            elif wire in FIXED_BYTES:
                length = FIXED_BYTES[wire]
            else:
                raise self._corrupt(f"the field before byte {at} has the unknown wire type {wire}")
            if length > end - at:
                raise self._corrupt(f"the field at byte {at} ends after its message")
            yield _Field(number, 0, at, at + length)
            at += length

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Reads the number at byte `at`, seven bits a byte with the lowest first; returns it and where the next thing
        is."""
        value = 0
        for position, byte in enumerate(self._map[at : min(at + MAX_VARINT, end)]):
            value |= (byte & 127) << 7 * position
            if byte < 128:
                return value, at + position + 1
        raise self._corrupt(f"the number at byte {at} does not end")

    def _corrupt(self, fault: str) -> StartupError:
        return unusable(self.path, f"corrupt: {fault}")
