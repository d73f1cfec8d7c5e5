"""Linear products of packed weights against float64 products of what the `gguf` package reads from the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tureen.weights.gguf_widen import WIDENED, widen

native = pytest.importorskip("tureen.kernels.cpu._native")

# values and bytes of a block, where its half floats are, and their usual size
BLOCKS = {"Q4_0": (32, 18, (0,), 0.05), "Q4_1": (32, 20, (0, 2), 0.05), "Q5_0": (32, 22, (0,), 0.03),
          "Q5_1": (32, 24, (0, 2), 0.03), "Q8_0": (32, 34, (0,), 0.005), "Q4_K": (256, 144, (0, 2), 0.002),
          "Q5_K": (256, 176, (0, 2), 0.001), "Q6_K": (256, 210, (208,), 0.0005),
          "Q3_K": (256, 110, (108,), 0.002), "Q2_K": (256, 84, (80, 82), 0.01), "MXFP4": (32, 17, (), 0),
          "IQ4_NL": (32, 18, (0,), 0.005), "IQ4_XS": (256, 136, (0,), 0.0005),
          "IQ2_S": (256, 82, (0,), 0.005), "IQ3_XXS": (256, 98, (0,), 0.002), "IQ3_S": (256, 110, (0,), 0.005),
          }  # fmt: skip
GROUPED = tuple(BLOCKS)  # formats multiplied with inputs of 8 bits, a scale for every 32
WIDE = (
    "Q4_1 int16",
    "Q4_0 int16",
    "Q6_K int16",
    "Q8_0 int16",
    "Q8_ROW int16",
    "Q2_K int16",
    "MXFP4 int16",
    "IQ2_S int16",
)
"""Multiplied with inputs of 16 bits."""
FORMATS = (*GROUPED, "Q8_ROW", "Q16", "BF16", "F32", *WIDE)


@pytest.fixture(scope="module")
def pool():
    return native.Pool(2)


def _make_weights(matrix_format, rows, cols, seed=0):
    """Returns the matrix and its values, float64 [rows, cols]."""
    if matrix_format in WIDE:
        matrix, values = _make_weights(matrix_format.split()[0], rows, cols, seed)
        matrix.widen()
        assert matrix.inputs == "int16"
        return matrix, values
    rng = np.random.default_rng(seed)
    if matrix_format not in BLOCKS:
        floats = rng.standard_normal((rows, cols), np.float32)
        return _pack_floats(floats, matrix_format)
    values, num_bytes, halves, size = BLOCKS[matrix_format]
    blocks = rng.integers(0, 256, (rows * cols // values, num_bytes), dtype=np.uint8)
    for at in halves:
        scales = (rng.standard_normal(len(blocks)) * size).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if matrix_format == "MXFP4":
        blocks[:, 0] = rng.integers(120, 128, len(blocks))
    return _pack_blocks(blocks, matrix_format, rows, cols)


def _pack_blocks(blocks, encoding, rows, cols):
    stored, matrix_format = blocks.reshape(-1), encoding
    if encoding in WIDENED:
        stored, matrix_format = widen(encoding, stored, blocks.shape[1]), WIDENED[encoding][0]
    matrix = native.Matrix.pack(native.Pool(1), stored, matrix_format, matrix_format, rows, cols)
    values = gguf.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType[encoding])
    return matrix, values.astype(np.float64)


def _pack_floats(floats, matrix_format):
    rows, cols = floats.shape
    matrix = native.Matrix.pack(native.Pool(1), floats.view(np.uint8).reshape(-1), "F32", matrix_format, rows, cols)
    return matrix, matrix.unpack().astype(np.float64)  # the values are tested in test_pack.py


def _make_inputs(rows, cols, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, cols), np.float32) * (10.0 ** rng.integers(-2, 2, (rows, 1))).astype(np.float32)


def _as_multiplied(x, matrix_format):
    """x as the kernels see it, float64."""
    if matrix_format == "F32":
        return x.astype(np.float64)
    if matrix_format == "BF16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)
    if matrix_format == "Q16":
        parts = native.quantize(x, "WORDS")
        scale = np.repeat(parts["scale"].astype(np.float64), 128, axis=1)
        return (scale * parts["words"])[:, : x.shape[1]]
    parts = native.quantize(x, "INT16_GROUP" if matrix_format in WIDE else "INT8_GROUP")
    scale = np.repeat(parts["scale"].astype(np.float64), 32, axis=1)
    return (scale * parts["q"]).reshape(len(x), -1, parts["q"].shape[1]).sum(axis=1)[:, : x.shape[1]]


def _assert_close(product, values, inputs, extra=0.0):
    """Off by a few roundings of the largest sums on the way; a group's offset may be as large as its values."""
    magnitude = np.abs(inputs) @ np.abs(values).T + np.abs(inputs).sum(axis=1)[:, None] * np.abs(values).max(axis=1)
    assert (np.abs(product - inputs @ values.T - extra) <= 1e-6 * (magnitude + np.abs(extra))).all()


def _sizes(matrix_format):
    is_super = BLOCKS.get(matrix_format.split()[0], (32,))[0] == 256
    return [256, 768, 2048] if is_super else [32, 64, 96, 576, 1536]


SHAPES = [(name, rows, cols) for name in FORMATS for cols in _sizes(name) for rows in (1, 16, 55)]
ODD_COLS = [(name, cols) for name in ("Q4_1", "Q8_ROW", "Q16", "BF16", "F32") for cols in (1, 31, 63, 65, 100, 255)]


@pytest.mark.parametrize(("matrix_format", "rows", "cols"), SHAPES)
def test_a_product_is_the_exact_one_but_for_rounding(pool, matrix_format, rows, cols):
    matrix, values = _make_weights(matrix_format, rows, cols)
    x = _make_inputs(7, cols)
    product = native.linear(pool, x, matrix)
    assert product.shape == (7, rows)
    assert product.dtype == np.float32
    _assert_close(product, values, _as_multiplied(x, matrix_format))


@pytest.mark.parametrize(("matrix_format", "cols"), ODD_COLS)
def test_the_number_of_columns_may_be_odd(pool, matrix_format, cols):
    matrix, values = _pack_floats(_make_inputs(21, cols, seed=2), matrix_format)
    x = _make_inputs(3, cols)
    _assert_close(native.linear(pool, x, matrix), values, _as_multiplied(x, matrix_format))


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_a_product_is_near_that_of_the_inputs_as_they_were(pool, matrix_format):
    matrix, values = _make_weights(matrix_format, 64, 1024)
    x = np.random.default_rng(3).standard_normal((8, 1024), np.float32)
    expected = x @ values.T
    error = np.abs(native.linear(pool, x, matrix) - expected).max() / expected.std()
    exact = {"F32": 1e-5, "Q16": 1e-3}
    assert error < exact.get(matrix_format, 2e-4 if matrix_format in WIDE else 0.05)


@pytest.mark.parametrize("matrix_format", ["F32", "BF16"])
def test_a_matrix_of_floats_is_multiplied_as_before_when_it_is_widened(pool, matrix_format):
    matrix, _ = _make_weights(matrix_format, 40, 512)
    x = _make_inputs(5, 512)
    before = native.linear(pool, x, matrix)
    matrix.widen()
    assert np.array_equal(native.linear(pool, x, matrix), before)


# Bytes of a block and what they may be, so that no sum has more bits than a float.
SMALL_SCALES = {
    "MXFP4": [(0, 1, [128])],
    "Q6_K": [(192, 208, [254, 255, 0, 1, 2])],
    "Q5_K": [(4, 16, range(4))],
    "Q4_K": [(4, 16, range(4))],
    "Q3_K": [(96, 104, range(256)), (104, 108, [0b10101010])],
    "Q2_K": [(0, 16, range(256))],
    "IQ4_XS": [(2, 4, [0b10101010]), (4, 8, [0, 1, 2, 0x10, 0x20, 0x12])],
    "IQ2_S": [(74, 82, [0, 1, 0x10, 0x11])],
    "IQ3_S": [(106, 110, [0, 1, 0x10, 0x11])],
    "IQ3_XXS": [(at, at + 1, [0x0F, 0x10, 0x1F]) for at in range(69, 98, 4)],
}


def _extreme_blocks(encoding, rows, cols, rng):
    """Blocks with scales 1 and integers that are mostly the least or the greatest."""
    values, num_bytes, halves, _ = BLOCKS[encoding]
    blocks = rng.choice(np.array([0, 255, 0x80, 0x7F, 0x0F, 0xF0], np.uint8), (rows * cols // values, num_bytes))
    blocks[: len(blocks) // 3] = 255
    blocks[len(blocks) // 3 : len(blocks) // 2] = 0x80 if encoding == "Q8_0" else 0
    for at in halves:
        blocks[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    for first, end, allowed in SMALL_SCALES.get(encoding, ()):
        blocks[:, first:end] = rng.choice(np.array(allowed, np.uint8), (len(blocks), end - first))
    return blocks


@pytest.mark.parametrize("sign", [1, -1, 0])
@pytest.mark.parametrize("encoding", GROUPED)
def test_sums_of_integers_are_exact_even_of_the_largest(pool, encoding, sign):
    rng = np.random.default_rng(4)
    matrix, values = _pack_blocks(_extreme_blocks(encoding, 48, 512, rng), encoding, 48, 512)
    x = np.full((9, 512), 127.0 * sign, np.float32)
    if sign == 0:
        x = rng.choice(np.array([-127, 127, 126, -126, 1, 0], np.float32), (9, 512))
        x[:, ::32] = 127  # so that the scale is 1
    expected = x.astype(np.float64) @ values.T
    assert sign == 0 or np.abs(expected).max() > 4e5
    assert np.array_equal(native.linear(pool, x, matrix), expected)


@pytest.mark.parametrize("cols", [128, 1000])
def test_sums_of_16_bit_integers_fit_even_of_the_largest(pool, cols):
    matrix, values = _pack_floats(np.full((48, cols), -3.0, np.float32), "Q16")
    x = np.full((9, cols), 0.7, np.float32)
    x[:4] *= -1
    x[8, ::2] = 0.001
    inputs = _as_multiplied(x, "Q16")
    assert np.abs(inputs - x).max() < 2e-4
    _assert_close(native.linear(pool, x, matrix), values, inputs)


def test_a_product_may_be_written_or_added_to_what_is_there(pool):
    matrix, _ = _make_weights("Q16", 40, 512)
    x, out = _make_inputs(6, 512), np.ones((6, 40), np.float32)
    product = native.linear(pool, x, matrix)
    assert native.linear(pool, x, matrix, None, out) is out
    assert np.array_equal(out, product)
    native.linear(pool, x, matrix, None, out, add=True)
    assert np.array_equal(out, product + product)
    with pytest.raises(ValueError, match=r"out is \[6, 40\], not \[5, 40\]"):
        native.linear(pool, x[:5], matrix, None, out)
    with pytest.raises(TypeError):
        native.linear(pool, x, matrix, None, out.astype(np.float64))
    with pytest.raises(ValueError, match="there is no out to add to"):
        native.linear(pool, x, matrix, add=True)


def test_inputs_too_large_to_be_kept_give_the_same_product(pool):
    matrix, _ = _make_weights("Q16", 16, 512)
    x = np.tile(_make_inputs(1025, 512), (8, 1))
    first = native.linear(pool, x[:1025], matrix)
    assert np.array_equal(native.linear(pool, x, matrix), np.tile(first, (8, 1)))


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_a_row_of_the_product_is_the_same_for_every_number_of_rows(pool, matrix_format):
    matrix, _ = _make_weights(matrix_format, 40, 768)
    x = _make_inputs(70, 768)
    whole = native.linear(pool, x, matrix)
    for rows in range(1, 70):
        assert np.array_equal(native.linear(pool, x[:rows], matrix), whole[:rows])
        assert np.array_equal(native.linear(pool, x[rows : rows + 1], matrix), whole[rows : rows + 1])


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_more_rows_and_columns_than_a_cache_holds_are_multiplied_as_few_are(matrix_format):
    pool = native.Pool(1)
    matrix, values = _make_weights(matrix_format, 120, 1536)
    x = _make_inputs(275, 1536)
    product = native.linear(pool, x, matrix)
    _assert_close(product, values, _as_multiplied(x, matrix_format))
    for row in range(0, 275, 13):
        assert np.array_equal(native.linear(pool, x[row : row + 1], matrix)[0], product[row])


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_product_does_not_depend_on_the_number_of_threads(pool, matrix_format, threads):
    for rows in (16, 200):
        matrix, _ = _make_weights(matrix_format, rows, 512)
        x = _make_inputs(11, 512)
        assert np.array_equal(native.linear(native.Pool(threads), x, matrix), native.linear(pool, x, matrix))


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_a_range_of_the_product_is_the_same_as_in_the_whole_and_nothing_else_is_written(pool, matrix_format):
    matrix, _ = _make_weights(matrix_format, 70, 512)
    x = _make_inputs(37, 512)
    whole = native.linear(pool, x, matrix)
    for m_range in ((0, 37), (3, 4), (5, 5), (1, 36), (30, 37)):
        for tile_range in ((0, 5), (2, 3), (4, 5), (1, 4), (3, 3)):
            out = np.full((37, 70), np.nan, np.float32)
            native.linear_range(x, matrix, out, m_range, tile_range)
            written = np.zeros((37, 70), bool)
            written[m_range[0] : m_range[1], tile_range[0] * 16 : tile_range[1] * 16] = True
            assert np.array_equal(out[written], whole[written])
            assert np.isnan(out[~written]).all()


@pytest.mark.parametrize("rows", [16, 37])
@pytest.mark.parametrize("matrix_format", FORMATS)
def test_a_bias_is_added_and_so_is_what_was_there_if_asked(pool, matrix_format, rows):
    matrix, values = _make_weights(matrix_format, rows, 512)
    x = _make_inputs(14, 512)
    rng = np.random.default_rng(5)
    bias, before = rng.standard_normal(rows, np.float32), rng.standard_normal((14, rows), np.float32)
    inputs = _as_multiplied(x, matrix_format)
    with_bias = native.linear(pool, x, matrix, bias)
    _assert_close(with_bias, values, inputs, bias)
    assert not np.array_equal(with_bias, native.linear(pool, x, matrix))
    tiles = (0, (rows + 15) // 16)
    out = before.copy()
    native.linear_range(x, matrix, out, (0, 14), tiles, True)
    _assert_sum(out, before, native.linear(pool, x, matrix), matrix_format)
    native.linear_range(x, matrix, out, (0, 14), tiles, False, bias)
    assert np.array_equal(out, with_bias)
    out = before.copy()
    native.linear_range(x, matrix, out, (0, 14), tiles, True, bias)
    _assert_sum(out, before, with_bias, matrix_format)


def _assert_sum(out, before, product, matrix_format):
    """With inputs of 16 bits, what was there is added between the two halves of the product."""
    if matrix_format in WIDE:
        assert np.allclose(out, before + product, rtol=0, atol=1e-6 * np.abs(product).max())
    else:
        assert np.array_equal(out, before + product)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("matrix_format", FORMATS)
def test_an_input_that_is_not_a_number_spoils_its_row_and_no_other(pool, matrix_format, bad):
    matrix, _ = _make_weights(matrix_format, 50, 512)
    x = _make_inputs(9, 512)
    clean = native.linear(pool, x, matrix)
    x[4, 300] = bad
    spoilt = native.linear(pool, x, matrix)
    assert not np.isfinite(spoilt[4]).any()
    if np.isnan(bad) or matrix_format not in ("F32", "BF16"):
        assert np.isnan(spoilt[4]).all()
    assert np.array_equal(np.delete(spoilt, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("scale", [0, 1, 2, 64, 127, 200, 232])
def test_every_scale_of_mxfp4_up_to_2_to_the_104_is_exact(pool, scale):
    blocks = np.random.default_rng(6).integers(0, 256, (4 * 16, 17), dtype=np.uint8)
    blocks[:, 0] = scale
    matrix, values = _pack_blocks(blocks, "MXFP4", 16, 128)
    x = np.zeros((3, 128), np.float32)
    x[:, 5] = 1, -1, 2
    assert np.array_equal(native.linear(pool, x, matrix), (x.astype(np.float64) @ values.T).astype(np.float32))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("scale", [233, 254, 255])
def test_a_larger_scale_of_mxfp4_is_exact_or_gives_what_is_not_a_number(pool, scale):
    blocks = np.random.default_rng(6).integers(0, 256, (4 * 16, 17), dtype=np.uint8)
    blocks[:, 0] = scale
    matrix, values = _pack_blocks(blocks, "MXFP4", 16, 128)
    x = np.random.default_rng(7).standard_normal((3, 128), np.float32)
    product = native.linear(pool, x, matrix)
    with np.errstate(all="ignore"):
        expected = (_as_multiplied(x, "MXFP4") @ values.T).astype(np.float32)
    assert (~np.isfinite(product) | np.isclose(product, expected, rtol=1e-5)).all()


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_zeros_give_zeros(pool, matrix_format):
    matrix, _ = _make_weights(matrix_format, 33, 256)
    assert not native.linear(pool, np.zeros((3, 256), np.float32), matrix).any()


def test_no_rows_give_no_rows(pool):
    matrix, _ = _make_weights("Q4_0", 33, 256)
    assert native.linear(pool, np.zeros((0, 256), np.float32), matrix).shape == (0, 33)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": np.zeros((2, 63), np.float32)}, ValueError, r"x is \[2, 63\], not \[any, 64\]"),
        ({"x": np.zeros(64, np.float32)}, ValueError, r"x is \[64\], not \[any, 64\]"),
        ({"x": np.zeros((2, 64))}, TypeError, "x has another element type"),
        ({"x": np.zeros((2, 128), np.float32)[:, ::2]}, ValueError, "x is not contiguous"),
        ({"bias": np.zeros(7, np.float32)}, ValueError, r"bias is \[7\], not \[8\]"),
        ({"out": np.zeros((2, 7), np.float32)}, ValueError, r"out is \[2, 7\], not \[2, 8\]"),
        ({"m_range": (0, 3)}, ValueError, "m_range is not within 0 and 2"),
        ({"m_range": (-1, 2)}, ValueError, "m_range is not within 0 and 2"),
        ({"tile_range": (1, 0)}, ValueError, "tile_range is not within 0 and 1"),
        ({"tile_range": (0, 1, 2)}, ValueError, "tile_range is not a pair"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, error, message):
    matrix, _ = _make_weights("Q4_0", 8, 64)
    usual = {
        "x": np.zeros((2, 64), np.float32),
        "out": np.zeros((2, 8), np.float32),
        "m_range": (0, 2),
        "tile_range": (0, 1),
    }
    with pytest.raises(error, match=message):
        native.linear_range(matrix=matrix, **(usual | arguments))
