"""Block formats against the `gguf` package: every bit of every value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tureen.errors import StartupError
from tureen.weights.gguf import ENCODINGS
from tureen.weights.gguf_quants import CHUNK_VALUES, dequantize
from tureen.weights.mapped import TensorEncoding

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,)}  # fmt: skip


def _random_blocks(encoding, num_blocks, seed=0):
    """Any bytes are valid but for scales: finite float16 numbers, some of them zero, negative or subnormal."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, encoding.num_bytes), dtype=np.uint8)
    for at in HALVES.get(encoding.name, ()):
        scales = (rng.standard_normal(num_blocks) * 10.0 ** rng.integers(-8, 3, num_blocks)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


@pytest.mark.parametrize("code", ENCODINGS)
@pytest.mark.parametrize("num_blocks", [1, 3, 1000])
def test_values_equal_those_of_the_gguf_package_bit_for_bit(code, num_blocks):
    encoding = ENCODINGS[code]
    raw = _random_blocks(encoding, num_blocks)
    out = np.full(num_blocks * encoding.block_len, np.nan, np.float32)
    dequantize(raw, encoding, out)
    with np.errstate(all="ignore"):
        stored = raw.view({"F32": "<f4", "F16": "<f2"}.get(encoding.name, np.uint8))
        expected = gguf.dequantize(stored.reshape(1, -1), gguf.GGMLQuantizationType(code)).reshape(-1)
    is_number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(out), ~is_number)
    assert np.array_equal(out.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])
    assert is_number.mean() > 0.9


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "BF16"])
def test_tensors_of_several_chunks_have_no_seams(name):
    code, encoding = next((code, encoding) for code, encoding in ENCODINGS.items() if encoding.name == name)
    num_blocks = CHUNK_VALUES // encoding.block_len * 2 + 5
    raw = _random_blocks(encoding, num_blocks)
    out = np.empty(num_blocks * encoding.block_len, np.float32)
    dequantize(raw, encoding, out)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(code)).reshape(-1)
    assert np.array_equal(out, expected, equal_nan=True)


def test_an_unknown_encoding_is_named():
    with pytest.raises(StartupError, match="IQ2_XXS"):
        dequantize(np.zeros(66, np.uint8), TensorEncoding("IQ2_XXS", 256, 66), np.empty(256, np.float32))


def test_bytes_that_do_not_fit_the_values_are_refused():
    with pytest.raises(StartupError, match="do not hold"):
        dequantize(np.zeros(34, np.uint8), ENCODINGS[8], np.empty(64, np.float32))


def test_an_infinite_scale_warns_of_nothing():
    raw = np.full(20, 0x7C, np.uint8)
    dequantize(raw, ENCODINGS[3], np.empty(32, np.float32))
