"""Block formats against the `gguf` package: every bit of every value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tureen.errors import StartupError
from tureen.weights.gguf import ENCODINGS
from tureen.weights.gguf_quants import CHUNK_VALUES, CONVERTERS, dequantize
from tureen.weights.gguf_widen import ENCODINGS as WIDE_ENCODINGS
from tureen.weights.gguf_widen import WIDENED, widen
from tureen.weights.mapped import TensorEncoding
from tureen.weights.stored import Stored, readable, to_float32

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "IQ4_NL": (0,), "IQ4_XS": (0,),
          "TQ1_0": (52,), "TQ2_0": (64,),
          **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,))}  # fmt: skip


def _random_blocks(encoding, num_blocks, seed=0):
    """Any bytes are valid but for scales: finite float16 numbers, some of them zero, negative or subnormal."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, encoding.num_bytes), dtype=np.uint8)
    for at in HALVES.get(encoding.name, ()):
        scales = (rng.standard_normal(num_blocks) * 10.0 ** rng.integers(-8, 3, num_blocks)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


@pytest.mark.parametrize("code", [code for code, encoding in ENCODINGS.items() if encoding.name in CONVERTERS])
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


@pytest.mark.parametrize("name", WIDENED)
@pytest.mark.parametrize("num_blocks", [1, 7, 5000])
def test_a_type_that_is_widened_keeps_every_bit_of_its_values(name, num_blocks):
    code, encoding = next((code, encoding) for code, encoding in ENCODINGS.items() if encoding.name == name)
    raw = _random_blocks(encoding, num_blocks)
    wide = WIDE_ENCODINGS[WIDENED[name][0]]
    out = np.empty(num_blocks * 256, np.float32)
    dequantize(widen(name, raw, encoding.num_bytes), wide, out)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(code)).reshape(-1)
    is_number = np.isfinite(expected)  # a scale of IQ1_M is put together from random bits
    assert np.array_equal(out.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])
    assert not np.isfinite(out[~is_number]).any()
    assert is_number.mean() > 0.8


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
    with pytest.raises(StartupError, match="Q8_K"):
        dequantize(np.zeros(292, np.uint8), TensorEncoding("Q8_K", 256, 292), np.empty(256, np.float32))


def test_bytes_that_do_not_fit_the_values_are_refused():
    with pytest.raises(StartupError, match="do not hold"):
        dequantize(np.zeros(34, np.uint8), ENCODINGS[8], np.empty(64, np.float32))


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda encoding: encoding.name)
def test_any_bytes_are_blocks_and_warn_of_nothing(encoding):
    raw = np.random.default_rng(1).integers(0, 256, 2000 * encoding.num_bytes, np.uint8)
    stored = readable(Stored("w", (2000, encoding.block_len), encoding.name, raw))
    assert to_float32(stored).shape == (2000, encoding.block_len)


def test_an_infinite_scale_warns_of_nothing():
    raw = np.full(20, 0x7C, np.uint8)
    dequantize(raw, ENCODINGS[3], np.empty(32, np.float32))
