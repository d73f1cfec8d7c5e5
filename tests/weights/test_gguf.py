"""The container reader: what the `gguf` package writes is read back; anything else ends in one StartupError."""

from __future__ import annotations

import gc
import os
import random
import struct
import threading

import gguf
import numpy as np
import pytest
import tiny_gguf
from samples import either
from work import count_lines

from tureen.errors import StartupError
from tureen.weights import source
from tureen.weights.gguf import GgufFile
from tureen.weights.source import ModelSource

MOST_LINES = 40_000

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.int": 7,
    "a.float": 1e-5,
    "a.text": "ünïcode 😀",
    "a.strings": ["", "x", "日本"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, 1.5],
    "a.bools": [True, False],
}


@pytest.fixture
def tiny(tmp_path):
    metadata = tiny_gguf.architecture_metadata("llama") | tiny_gguf.byte_vocabulary()
    tensors = {"token_embd.weight": np.ones((256, 64), np.float32), "output_norm.weight": np.zeros(64, np.float16)}
    return tiny_gguf.write_gguf(tmp_path / "tiny.gguf", metadata, tensors)


def test_metadata_is_read_as_it_was_written(tmp_path):
    file = GgufFile(tiny_gguf.write_gguf(tmp_path / "m.gguf", METADATA))
    for key, value in METADATA.items():
        read = file.metadata[key]
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == value


@pytest.mark.parametrize(
    "odd", [[], [""], ["x" * 255], ["x" * 256], ["\0"], ["a\0b", ""], ["\0" * 8], ["", ""], ["ä" * 127 + "€"], ["𝄞"]]
)
@pytest.mark.parametrize("place", [0, 40, 100])
def test_a_long_array_of_strings_is_read_as_it_was_written_whatever_is_in_it(tmp_path, odd, place):
    plain = [f"Ġtoken {number}" for number in range(100)]
    strings = plain[:place] + odd + plain[place:]
    path = tiny_gguf.write_gguf(tmp_path / "s.gguf", {"strings": strings, "after": 7})
    metadata = GgufFile(path).metadata
    assert metadata["strings"] == strings
    assert metadata["after"] == 7


def test_a_string_of_a_long_array_that_is_not_utf_8_is_named_by_its_place(tmp_path):
    path = tiny_gguf.write_gguf(tmp_path / "s.gguf", {"strings": [f"token {number:03}" for number in range(100)]})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"token 050", b"token\xff050"))
    metadata = GgufFile(path).metadata
    with pytest.raises(StartupError, match=f"the string at byte {data.index(b'token 050')} is not UTF-8"):
        metadata["strings"]


def test_tensors_are_read_as_they_were_written(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "one": rng.standard_normal((3, 5), dtype=np.float32),
        "two": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "three": rng.standard_normal(7, dtype=np.float32),
    }
    file = GgufFile(tiny_gguf.write_gguf(tmp_path / "t.gguf", METADATA, tensors))
    assert list(file.tensors) == list(tensors)
    for name, array in tensors.items():
        info = file.tensors[name]
        assert info.shape == array.shape
        assert info.num_elements == array.size
        assert np.array_equal(file.raw(info).view(array.dtype).reshape(array.shape), array)
        file.release(info)
        assert bytes(file.raw(info)) == array.tobytes()


def test_a_string_that_is_not_utf_8_is_refused_when_it_is_asked_for(tmp_path):
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", METADATA)
    path.write_bytes(path.read_bytes().replace("日本".encode(), b"\xff" * 6))
    metadata = GgufFile(path).metadata
    assert metadata["a.text"] == METADATA["a.text"]
    with pytest.raises(StartupError, match=r"m\.gguf: the string at byte \d+ is not UTF-8"):
        metadata["a.strings"]


def test_every_type_of_number_is_read(tmp_path):
    kinds = {"UINT8": 200, "INT8": -3, "UINT16": 60000, "INT16": -300, "UINT32": 4_000_000_000, "INT32": -70000,
             "UINT64": 1 << 63, "INT64": -(1 << 40), "FLOAT64": 0.1, "FLOAT32": 0.1}  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "llama")
    for kind, value in kinds.items():
        writer.add_key_value(kind, value, gguf.GGUFValueType[kind])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "n.gguf").metadata
    assert {kind: metadata[kind] for kind in kinds} == kinds
    assert [list(inner) for inner in metadata["nested"]] == [[1, 2], [3]]


def _fault(path):
    faults = []

    def read():
        with pytest.raises(StartupError) as caught:
            GgufFile(path)
        faults.append(caught)

    assert count_lines(read) < MOST_LINES  # however large it says it is
    (caught,) = faults
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "empty"),
        (b"GGUF", "truncated"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "4611686018427387904 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40) + bytes(100), "metadata keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63) + bytes(20), "ends beyond the file"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4) + bytes(20), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(20), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60) + bytes(20), "strings"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 6, 1 << 60) + bytes(20), "numbers"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 50, "nested too deep"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_one_line_that_names_file_and_fault(tmp_path, data, fault):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    assert fault in _fault(path)


@pytest.mark.parametrize(
    ("limit", "least", "fault"),
    [
        ("MAX_METADATA_BYTES", 560, "metadata has more than 559 bytes"),
        ("MAX_VALUE_BYTES", 300, "strings at byte 94 have more than 299 bytes"),
        ("MAX_PARTS", 17, "metadata has more than 16 strings and arrays"),
    ],
)
def test_metadata_that_would_take_long_to_read_is_refused(tmp_path, monkeypatch, limit, least, fault):
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", {"a": ["x" * 22] * 10, "b": [[1, 2], [3]], "c": [7] * 20})
    monkeypatch.setattr(f"tureen.weights.gguf.{limit}", least)
    assert GgufFile(path).metadata["c"].tolist() == [7] * 20
    monkeypatch.setattr(f"tureen.weights.gguf.{limit}", least - 1)
    assert fault in _fault(path)


def join_read_ahead():
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()


def test_reading_ahead_leaves_no_thread_and_no_descriptor_behind(tiny):
    gc.collect()
    join_read_ahead()
    before = len(os.listdir("/proc/self/fd"))
    file = GgufFile(tiny)
    join_read_ahead()
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the map's own
    assert "output_norm.weight" in file.tensors


def test_a_missing_file_is_named(tmp_path):
    assert "there is no such file" in _fault(tmp_path / "nothing.gguf")


def test_a_truncated_file_says_which_tensor_is_cut(tiny):
    tiny.write_bytes(tiny.read_bytes()[:-100])
    assert "'output_norm.weight' ends at byte" in _fault(tiny)


def test_tensors_that_overlap_are_refused(tmp_path):
    path = tiny_gguf.write_gguf(
        tmp_path / "o.gguf", METADATA, {"one": np.ones(64, np.float32), "two": np.ones(64, np.float32)}
    )
    data = path.read_bytes()
    at = data.index(b"two") + 3 + 4 + 8 + 4
    assert struct.unpack_from("<Q", data, at) == (256,)
    path.write_bytes(data[:at] + struct.pack("<Q", 32) + data[at + 8 :])
    assert "overlap" in _fault(path)


def test_a_type_that_cannot_be_read_is_named_with_the_file_to_take_instead(tmp_path):
    raw = np.zeros((1, 36), np.uint8), gguf.GGMLQuantizationType.NVFP4
    metadata = tiny_gguf.architecture_metadata("llama") | tiny_gguf.byte_vocabulary()
    path = tiny_gguf.write_gguf(tmp_path / "nvfp4.gguf", metadata, {"t": raw})
    message = _message_of_use(path)
    assert "tensor 't' has type NVFP4, which cannot be read" in message
    assert message.endswith("; take the model's Q4_K_M file")


def _use(path):
    """All that start-up reads of a file."""
    found = ModelSource("tiny", path, "gguf")
    source.model_config(found)
    source.load_tokenizer(found)


def _message_of_use(path):
    try:
        _use(path)
    except StartupError as error:
        return error.message
    return ""


def test_no_truncation_raises_anything_but_a_startup_error(tiny):
    _use(tiny)
    data = tiny.read_bytes()
    header = data.index(b"output_norm.weight") + 64
    lengths = [*range(0, header, 37), *range(header, len(data), 4999)]
    for length in lengths:
        tiny.write_bytes(data[:length])
        with pytest.raises(StartupError):
            _use(tiny)


@pytest.mark.sampled
def test_no_flipped_bytes_raise_anything_but_a_startup_error(tiny):
    data = tiny.read_bytes()
    header = data.index(b"output_norm.weight") + 64
    rng = random.Random(0)
    refused, num_cases = 0, either(1500, 300)
    for _ in range(num_cases):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        tiny.write_bytes(damaged)
        message = _message_of_use(tiny)
        refused += message != ""
        assert "\n" not in message
    assert refused > 0.2 * num_cases


@pytest.mark.model
def test_the_default_model_is_read_without_a_look_at_each_of_its_tokens(default_model_source):
    assert count_lines(lambda: GgufFile(default_model_source.path)) < MOST_LINES
    file = GgufFile(default_model_source.path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
