"""Packed weights against the `gguf` package: every bit of every value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tureen.weights.gguf_widen import WIDENED, widen

native = pytest.importorskip("tureen.kernels.cpu._native")

BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
          "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
          "Q3_K": (256, 110), "Q2_K": (256, 84), "MXFP4": (32, 17), "IQ4_NL": (32, 18),
          "IQ4_XS": (256, 136)}  # fmt: skip
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "MXFP4": (), "IQ4_NL": (0,), "IQ4_XS": (0,)}  # fmt: skip
QUANTIZED = tuple(HALVES)
# Smallest and largest subnormal, smallest normal, largest, zeros, infinities and NaN.
ODD_HALVES = np.array([0x0001, 0x83FF, 0x0400, 0x7BFF, 0, 0x8000, 0x7C00, 0xFC00, 0x7E00], np.uint16)


@pytest.fixture(scope="module", params=[1, 2, 3])
def pool(request):
    return native.Pool(request.param)


def _make_stored(encoding, rows, cols, seed=0, odd=False):
    """Random blocks, uint8 [rows, bytes]. With `odd`, half of the scales are from ODD_HALVES."""
    rng = np.random.default_rng(seed)
    values, num_bytes = BLOCKS[encoding]
    if encoding in ("F32", "F16", "BF16"):
        floats = rng.standard_normal((rows, cols), np.float32)
        stored = {"F32": floats, "F16": floats.astype(np.float16), "BF16": (floats.view(np.uint32) >> 16).astype("<u2")}
        return stored[encoding].view(np.uint8).reshape(rows, -1)
    raw = rng.integers(0, 256, (rows * cols // values, num_bytes), dtype=np.uint8)
    for at in HALVES[encoding]:
        scales = (rng.standard_normal(len(raw)) * 10.0 ** rng.integers(-8, 3, len(raw))).astype(np.float16)
        picked = rng.integers(0, 2 * len(ODD_HALVES), len(raw))
        if odd:
            scales = np.where(picked < len(ODD_HALVES), ODD_HALVES[picked % len(ODD_HALVES)].view(np.float16), scales)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def _dequantized(stored, encoding):
    with np.errstate(all="ignore"):
        view = stored.view({"F32": "<f4", "F16": "<f2"}.get(encoding, np.uint8))
        return gguf.dequantize(view, gguf.GGMLQuantizationType[encoding])


def _assert_same_bits(values, expected):
    is_number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(values), ~is_number)
    assert np.array_equal(values.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])


def _pack(pool, stored, encoding, matrix_format, rows, cols, **options):
    return native.Matrix.pack(pool, stored.reshape(-1), encoding, matrix_format, rows, cols, **options)


@pytest.mark.parametrize("odd", [False, True], ids=["ordinary scales", "odd scales"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (16, 512), (33, 768), (47, 256)])
@pytest.mark.parametrize("encoding", QUANTIZED)
def test_a_matrix_of_the_encodings_own_format_holds_the_values_that_gguf_computes(pool, encoding, rows, cols, odd):
    stored = _make_stored(encoding, rows, cols, odd=odd)
    matrix = _pack(pool, stored, encoding, encoding, rows, cols)
    assert (matrix.rows, matrix.cols, matrix.format) == (rows, cols, encoding)
    _assert_same_bits(matrix.unpack(), _dequantized(stored, encoding))


@pytest.mark.parametrize(("name", "at"), [("IQ2_S", 0), ("IQ3_XXS", 0), ("IQ3_S", 0), ("TQ2_0", 64)])
def test_a_matrix_of_a_widened_type_holds_the_values_that_gguf_computes(pool, name, at):
    code = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(10)
    blocks = rng.integers(0, 256, (21 * 3, gguf.GGML_QUANT_SIZES[code][1]), dtype=np.uint8)
    blocks[:, at : at + 2] = rng.standard_normal(len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    expected = gguf.dequantize(blocks.reshape(21, -1), code)
    encoding, wide = WIDENED[name][0], widen(name, blocks.reshape(-1), blocks.shape[1])
    for matrix_format in (encoding, "F32"):
        matrix = _pack(pool, wide, encoding, matrix_format, 21, 768)
        _assert_same_bits(matrix.unpack(), expected)


@pytest.mark.parametrize("cols", [32, 96, 288])
@pytest.mark.parametrize("encoding", [name for name in QUANTIZED if BLOCKS[name][0] == 32])
def test_columns_need_be_no_more_than_a_multiple_of_a_block(pool, encoding, cols):
    stored = _make_stored(encoding, 5, cols)
    _assert_same_bits(_pack(pool, stored, encoding, encoding, 5, cols).unpack(), _dequantized(stored, encoding))


@pytest.mark.parametrize("odd", [False, True], ids=["ordinary scales", "odd scales"])
@pytest.mark.parametrize("encoding", BLOCKS)
def test_float_matrices_hold_the_values_of_every_encoding(pool, encoding, odd):
    stored = _make_stored(encoding, 21, 512, odd=odd)
    _assert_same_bits(_pack(pool, stored, encoding, "F32", 21, 512).unpack(), _dequantized(stored, encoding))


@pytest.mark.parametrize("cols", [1, 7, 63, 65, 200])
@pytest.mark.parametrize(
    ("encoding", "matrix_format"), [("F32", "F32"), ("F16", "F32"), ("BF16", "BF16"), ("BF16", "F32")]
)
def test_floats_stay_as_they_are_whatever_the_number_of_columns(pool, encoding, matrix_format, cols):
    stored = _make_stored(encoding, 19, cols)
    _assert_same_bits(_pack(pool, stored, encoding, matrix_format, 19, cols).unpack(), _dequantized(stored, encoding))


def test_every_half_float_is_read_exactly(pool):
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(16, -1)
    with np.errstate(all="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    _assert_same_bits(_pack(pool, halves.view(np.uint8), "F16", "F32", 16, 1 << 12).unpack(), expected)


def test_bfloat16_weights_are_rounded_to_the_nearest_even(pool):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, (16, 512), dtype=np.uint32)
    bits[:, ::2] = (bits[:, ::2] & 0xFFFF0000) | 0x8000  # ties
    bits[0, :4] = 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1  # overflow, infinities, subnormal
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    _assert_same_bits(_pack(pool, values.view(np.uint8), "F32", "BF16", 16, 512).unpack(), expected)


@pytest.mark.parametrize("cols", [1, 64, 100, 576])
def test_eight_bit_rows_are_off_by_half_a_step_at_most(pool, cols):
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((37, cols)) * 10.0 ** rng.integers(-30, 30, (37, 1))).astype(np.float32)
    values[5] = 0
    unpacked = _pack(pool, values.view(np.uint8), "F32", "Q8_ROW", 37, cols).unpack().astype(np.float64)
    step = np.abs(values).max(axis=1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(unpacked - values) <= step * (0.5 + 1e-4)).all()
    assert not unpacked[5].any()
    largest = np.abs(values).argmax(axis=1)[:, None]
    np.testing.assert_allclose(
        np.take_along_axis(unpacked, largest, 1), np.take_along_axis(values, largest, 1), rtol=1e-6
    )


@pytest.mark.parametrize("cols", [1, 64, 100, 576])
def test_sixteen_bits_are_off_by_half_a_step_of_128_columns_at_most(pool, cols):
    rng = np.random.default_rng(4)
    sizes = 10.0 ** rng.integers(-8, 8, (37, -(-cols // 128)))
    values = (rng.standard_normal((37, cols)) * np.repeat(sizes, 128, axis=1)[:, :cols]).astype(np.float32)
    values[5] = 0
    unpacked = _pack(pool, values.view(np.uint8), "F32", "Q16", 37, cols).unpack().astype(np.float64)
    for at in range(0, cols, 128):
        span = slice(at, at + 128)
        step = np.abs(values[:, span]).max(axis=1, keepdims=True).astype(np.float64) / 8191
        assert (np.abs(unpacked[:, span] - values[:, span]) <= step * (0.5 + 1e-3)).all()
    assert not unpacked[5].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_a_number_spoils_its_row_or_group_and_no_other(pool, bad):
    values = np.random.default_rng(5).standard_normal((20, 128), np.float32)
    values[3, 40] = bad
    rows = _pack(pool, values.view(np.uint8), "F32", "Q8_ROW", 20, 128).unpack()
    assert np.isnan(rows[3]).all()
    assert np.isfinite(np.delete(rows, 3, axis=0)).all()
    assert np.isnan(_pack(pool, values.view(np.uint8), "F32", "Q16", 20, 128).unpack()[3]).all()
    groups = _pack(pool, values.view(np.uint8), "F32", "Q4_1", 20, 128).unpack().reshape(20, 4, 32)
    assert np.isnan(groups[3, 1]).all()
    assert np.isnan(groups).sum() == 32


def _squared_error(groups, d, m):
    levels = np.clip(np.round((groups - m) / d), 0, 15)
    return ((levels * d + m - groups) ** 2).sum(axis=1), levels


def _even_error(groups, low=0.0, high=0.0):
    """Squared error per group [n, 32] of 16 even levels, the ends moved inwards by parts of the range; and levels."""
    least, greatest = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    d = (greatest - least) * (1 - low - high) / 15
    return _squared_error(groups, d, least + low * (greatest - least))


def _searched_error(groups):
    """The least squared error that a long search finds: lines fitted to the levels of many starting points, twice."""
    best = np.full(len(groups), np.inf)
    for low in np.arange(-0.12, 0.25, 0.03):
        for high in np.arange(-0.12, 0.25, 0.03):
            _, levels = _even_error(groups, low, high)
            for _ in range(2):
                mean_level, mean = levels.mean(axis=1, keepdims=True), groups.mean(axis=1, keepdims=True)
                spread = ((levels - mean_level) ** 2).sum(axis=1, keepdims=True)
                d = ((levels - mean_level) * (groups - mean)).sum(axis=1, keepdims=True) / spread
                error, levels = _squared_error(groups, d, mean - d * mean_level)
                best = np.minimum(best, error)
    return best


@pytest.mark.parametrize("kind", ["normal", "uniform", "outlier", "shifted"])
def test_four_bit_groups_are_nearly_as_near_as_a_long_search_gets(kind):
    rng = np.random.default_rng(6)
    values = rng.random((40, 320)) if kind == "uniform" else rng.standard_normal((40, 320))
    values[:, ::32] *= 6 if kind == "outlier" else 1
    values = (values * 0.5 + 3 if kind == "shifted" else values).astype(np.float32)
    unpacked = _pack(native.Pool(1), values.view(np.uint8), "F32", "Q4_1", 40, 320).unpack().astype(np.float64)
    groups = values.astype(np.float64).reshape(-1, 32)
    error = ((unpacked.reshape(-1, 32) - groups) ** 2).sum(axis=1)
    even, _ = _even_error(groups)
    assert (error <= even * 1.02).all()  # half floats take their part
    assert error.sum() < 0.9 * even.sum()
    assert error.sum() < 1.08 * _searched_error(groups).sum()


def test_four_bit_groups_of_one_value_and_of_two_values_lose_no_more_than_half_floats_do(pool):
    values = np.full((3, 64), 0.7310585, np.float32)
    values[1, ::2] = -0.25
    values[2] = 0
    unpacked = _pack(pool, values.view(np.uint8), "F32", "Q4_1", 3, 64).unpack()
    np.testing.assert_allclose(unpacked, values, rtol=2**-9)


def test_four_bit_weights_beyond_half_floats_saturate(pool):
    values = np.full((1, 32), 1e30, np.float32)
    assert np.array_equal(_pack(pool, values.view(np.uint8), "F32", "Q4_1", 1, 32).unpack(), np.full((1, 32), 65504.0))


@pytest.mark.parametrize("cols", [1, 31, 33, 100])
def test_four_bit_groups_may_be_cut_short_by_the_last_column(pool, cols):
    values = np.random.default_rng(7).standard_normal((17, cols), np.float32)
    unpacked = _pack(pool, values.view(np.uint8), "F32", "Q4_1", 17, cols).unpack()
    assert np.abs(unpacked - values).max() < 0.25


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_integers_made_of_another_encoding_are_those_made_of_its_values(pool, encoding):
    stored = _make_stored(encoding, 18, 256)
    floats = _dequantized(stored, encoding)
    for matrix_format in ("Q8_ROW", "Q16", "Q4_1", "BF16"):
        if matrix_format == encoding:
            continue
        made = _pack(pool, stored, encoding, matrix_format, 18, 256).unpack()
        _assert_same_bits(made, _pack(pool, floats.view(np.uint8), "F32", matrix_format, 18, 256).unpack())


@pytest.mark.parametrize(
    ("encoding", "matrix_format"), [("Q4_K", "Q4_K"), ("Q6_K", "Q6_K"), ("Q4_1", "Q4_1"), ("F16", "Q8_ROW")]
)
def test_rows_are_taken_in_the_order_asked_for(pool, encoding, matrix_format):
    stored = _make_stored(encoding, 40, 256)
    whole = _pack(pool, stored, encoding, matrix_format, 40, 256).unpack()
    for order in (np.random.default_rng(8).permutation(40), np.array([7, 7, 0, 39])):
        matrix = _pack(pool, stored, encoding, matrix_format, len(order), 256, row_order=order.astype(np.int64))
        _assert_same_bits(matrix.unpack(), whole[order])


@pytest.mark.parametrize(
    ("encoding", "bits"),
    [("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q5_1", 6), ("Q8_0", 8.5), ("Q4_K", 4.625), ("Q5_K", 5.625),
     ("Q6_K", 6.5625), ("Q3_K", 3.5625), ("Q2_K", 2.625), ("MXFP4", 4.25), ("IQ4_NL", 4.5), ("IQ4_XS", 4.3125),
     ("WIDE_IQ2", 4.5625), ("Q16", 16.25)],
)  # fmt: skip
def test_a_matrix_takes_as_many_bytes_as_its_integers_and_scales(encoding, bits):
    assert native.Matrix.blank(encoding, 64, 1024).nbytes == 64 * 1024 * bits / 8
    assert native.packed_bytes(encoding, 64, 1024) == 64 * 1024 * bits / 8


def test_stored_bytes_may_be_read_only_and_at_an_odd_address(pool):
    values = np.random.default_rng(9).standard_normal((4, 64), np.float32)
    memory = np.zeros(values.nbytes + 1, np.uint8)
    memory[1:] = values.view(np.uint8).reshape(-1)
    memory.flags.writeable = False
    assert np.array_equal(_pack(pool, memory[1:], "F32", "F32", 4, 64).unpack(), values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "Q8_K"}, "encoding Q8_K is unknown; there are F32, BF16"),
        ({"matrix_format": "Q8_K"}, "matrix format Q8_K is unknown; there are F32, BF16"),
        ({"matrix_format": "Q4_0"}, "Q4_1 weights cannot become Q4_0"),
        ({"cols": 48}, "rows of Q4_1 hold a multiple of 32 values, not 48"),
        ({"rows": 3}, "80 bytes are not 3 rows of 64 values in Q4_1"),
        ({"rows": 0}, "a matrix cannot be 0 x 64"),
        ({"cols": -32}, "a matrix cannot be 2 x -32"),
        ({"row_order": np.array([0, 2])}, r"row_order\[1\] is 2; there are 2 rows"),
        ({"row_order": np.array([-1, 0])}, r"row_order\[0\] is -1; there are 2 rows"),
        ({"row_order": np.array([0])}, r"row_order is \[1\], not \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(pool, options, message):
    arguments = {"encoding": "Q4_1", "matrix_format": "Q4_1", "rows": 2, "cols": 64} | options
    with pytest.raises(ValueError, match=message):
        _pack(pool, np.zeros(80, np.uint8), **arguments)


def test_arrays_of_other_types_and_strides_are_refused_by_name(pool):
    with pytest.raises(TypeError, match="stored has another element type"):
        _pack(pool, np.zeros(20, np.float32), "Q4_1", "Q4_1", 2, 64)
    with pytest.raises(ValueError, match="stored is not contiguous"):
        native.Matrix.pack(pool, np.zeros(160, np.uint8)[::2], "Q4_1", "Q4_1", 2, 64)
    with pytest.raises(TypeError, match="row_order has another element type"):
        _pack(pool, np.zeros(80, np.uint8), "Q4_1", "Q4_1", 2, 64, row_order=np.zeros(2, np.int32))


def test_the_bytes_of_a_matrix_outlive_it_and_fill_it():
    values = np.random.default_rng(0).standard_normal((20, 96), np.float32)
    packed = native.Matrix.pack(native.Pool(1), values.view(np.uint8).reshape(-1), "F32", "Q4_1", 20, 96)
    blank = native.Matrix.blank("Q4_1", 20, 96)
    assert not blank.data.any()
    blank.data[:] = packed.data
    expected, data = packed.unpack(), packed.data.copy()
    assert np.array_equal(blank.unpack(), expected)
    view = blank.data
    del blank
    assert np.array_equal(view, data)


def test_a_pool_has_at_least_one_thread():
    assert native.Pool(2).threads == 2
    with pytest.raises(ValueError, match="at least one thread"):
        native.Pool(0)


def test_a_matrix_over_bytes_that_are_there_copies_none_and_keeps_them():
    packed = native.Matrix.blank("Q8_0", 32, 64)
    packed.data[:] = np.random.default_rng(1).integers(0, 256, packed.nbytes, np.uint8)
    over = native.Matrix.over(packed.data, "Q8_0", 32, 64)
    assert over.data.ctypes.data == packed.data.ctypes.data
    expected = packed.data.copy()
    del packed
    assert np.array_equal(over.data, expected)


@pytest.mark.parametrize(("begin", "size", "fault"), [(0, 63, r"data is \[63\], not \["), (1, None, "multiple of 64")])
def test_bytes_that_are_no_matrix_are_refused(begin, size, fault):
    room = native.Matrix.blank("Q8_0", 32, 64).data
    wanted = native.packed_bytes("Q8_0", 16, 64)
    with pytest.raises(ValueError, match=fault):
        native.Matrix.over(room[begin : begin + (size or wanted)], "Q8_0", 16, 64)
