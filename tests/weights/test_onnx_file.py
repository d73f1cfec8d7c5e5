"""ONNX files, compared with what the onnx package reads, and damaged ones."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from tureen.errors import StartupError
from tureen.weights.onnx_file import OnnxFile

onnx = pytest.importorskip("onnx")
DTYPES = ("f4", "f2", "f8", "i4", "i8", "?")


def _make_model(tensors, nodes=()):
    graph = onnx.helper.make_graph(nodes, "g", [], [], tensors)
    return onnx.helper.make_model(graph, producer_name="tests")


def _make_file(path):
    """A node without a name or weights, one that takes a weight twice, and a tensor of each type, with 0 to 3 dims."""
    chance = np.random.default_rng(0)
    tensors = [
        onnx.numpy_helper.from_array((chance.standard_normal(shape) * 300).astype(dtype), f"{dtype} {shape}")
        for dtype in DTYPES
        for shape in ((), (7,), (3, 5), (2, 1, 300), (0, 4))
    ]
    nodes = [
        onnx.helper.make_node("Add", ["a", "b"], ["c"]),
        onnx.helper.make_node(
            "MatMul", ["f4 (3, 5)", "c", "f4 (3, 5)"], ["d"], name="/backbone/é/MatMul", doc_string="x"
        ),
        onnx.helper.make_node("Constant", [], ["e"], name="e", value_float=1.5),
    ]
    onnx.save(_make_model(tensors, nodes), path)
    return path


def _fault(path):
    with pytest.raises(StartupError) as caught:
        OnnxFile(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def test_weights_and_nodes_are_those_that_the_onnx_package_reads(tmp_path):
    file = OnnxFile(_make_file(tmp_path / "m.onnx"))
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert list(file.tensors) == [tensor.name for tensor in graph.initializer]
    for tensor in graph.initializer:
        values, info = onnx.numpy_helper.to_array(tensor), file.tensors[tensor.name]
        assert info.shape == values.shape
        assert file.raw(info).tobytes() == values.tobytes()
    assert [tuple(node) for node in file.nodes] == [(node.name, tuple(node.input)) for node in graph.node]


def test_dimensions_may_be_packed(tmp_path):
    loose = onnx.numpy_helper.from_array(np.zeros((300, 2), "f4"), "w")
    packed = b"\x0a\x03\xac\x02\x02" + loose.SerializeToString().removeprefix(b"\x08\xac\x02\x08\x02")
    graph = b"\x2a" + _length(packed) + packed
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + _length(graph) + graph)
    assert OnnxFile(tmp_path / "m.onnx").tensors["w"].shape == (300, 2)


def test_dimensions_are_bounded_before_they_are_multiplied(tmp_path):
    many = onnx.TensorProto(dims=[1] * 9, data_type=1, raw_data=bytes(4), name="w")
    large = onnx.TensorProto(dims=[1 << 49], data_type=1, raw_data=bytes(4), name="w")
    for tensor in (many, large):
        onnx.save(_make_model([tensor]), tmp_path / "m.onnx")
        assert re.search(r"the tensor at byte \d+ has an impossible shape", _fault(tmp_path / "m.onnx"))


def _length(message):
    return bytes([len(message) & 127 | 128, len(message) >> 7])


def test_a_file_cut_short_is_refused_wherever_that_is(tmp_path):
    whole = _make_file(tmp_path / "m.onnx").read_bytes()
    cut = tmp_path / "cut.onnx"
    for size in range(1, len(whole), 97):
        cut.write_bytes(whole[:size])
        try:
            OnnxFile(cut)
        except StartupError:
            continue
        assert size > len(whole) - 40  # the opset's version is all that is behind the graph


def test_a_damaged_byte_never_does_more_than_refuse_the_file(tmp_path):
    whole = _make_file(tmp_path / "m.onnx").read_bytes()
    chance, damaged = random.Random(0), tmp_path / "damaged.onnx"
    for _ in range(300):
        at = chance.randrange(len(whole))
        damaged.write_bytes(whole[:at] + bytes([chance.randrange(256)]) + whole[at + 1 :])
        try:
            file = OnnxFile(damaged)
        except StartupError:
            continue
        assert all(len(file.raw(info)) == info.num_bytes for info in file.tensors.values())


def test_values_that_are_kept_elsewhere_or_of_another_type_are_refused_by_name(tmp_path):
    path = tmp_path / "m.onnx"
    listed = onnx.helper.make_tensor("listed", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    onnx.save(_make_model([listed]), path)
    assert "tensor 'listed' has values outside its raw data" in _fault(path)
    onnx.save(_make_model([onnx.helper.make_tensor("text", onnx.TensorProto.STRING, [1], [b"x"])]), path)
    assert "tensor 'text' has values of type 8" in _fault(path)


def test_bytes_that_do_not_fill_the_shape_are_refused(tmp_path):
    tensor = onnx.numpy_helper.from_array(np.zeros((2, 3), "f4"), "w")
    tensor.raw_data = bytes(20)
    onnx.save(_make_model([tensor]), tmp_path / "m.onnx")
    assert "tensor 'w': 20 bytes do not hold F32 of shape [2, 3]" in _fault(tmp_path / "m.onnx")


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"GGUF" + bytes(100))
    assert "corrupt" in _fault(path)
    onnx.save(_make_model([]), path)
    assert "it holds no weights" in _fault(path)
