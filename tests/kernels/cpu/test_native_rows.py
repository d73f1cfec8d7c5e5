"""The native kernels that work on single rows, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

native = pytest.importorskip("tureen.kernels.cpu._native")

Array = np.ndarray[Any, Any]

COLS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 95, 96, 100, 255, 256, 257, 576, 1536]
GROUP = 32


def _make_normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _make_wide_range(cols: int) -> Array:
    """Both signs, magnitudes from subnormal to 1e30, and zeros."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, cols)) * 10.0 ** rng.integers(-42, 30, (1, cols))
    x[0, ::7] = 0
    return x.astype(np.float32)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        wanted: Array = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    return wanted


def _gelu_tanh(x: Array) -> Array:
    return torch.nn.functional.gelu(torch.from_numpy(x).double(), approximate="tanh").numpy()


@pytest.mark.parametrize("cols", COLS)
def test_rms_norm_divides_by_the_root_mean_square(cols: int) -> None:
    x, weight = _make_normal(3, cols), _make_normal(cols, seed=1)
    wanted = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(native.rms_norm(native.Pool(1), x, weight, 1e-5), wanted, rtol=1e-6, atol=0)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not native.rms_norm(native.Pool(1), np.zeros((1, 40), np.float32), np.ones(40, np.float32), 1e-6).any()


def test_rms_norm_of_tiny_rows_is_governed_by_eps() -> None:
    x = np.full((1, 40), 1e-30, np.float32)
    assert np.allclose(native.rms_norm(native.Pool(1), x, np.ones(40, np.float32), 1e-6), 1e-27, rtol=1e-6, atol=0)


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 99])
def test_rms_norm_of_a_row_with_nan_is_nan(at: int) -> None:
    x = _make_normal(2, 100)
    x[0, at] = np.nan
    y = native.rms_norm(native.Pool(1), x, np.ones(100, np.float32), 1e-6)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("cols", COLS)
def test_add_adds(cols: int) -> None:
    x, y = _make_normal(2, cols), _make_normal(2, cols, seed=1)
    assert np.array_equal(native.add(x, y), x + y)


GATES = [("silu_mul", _silu), ("gelu_tanh_mul", _gelu_tanh)]


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize(("name", "activation"), GATES)
def test_gates_multiply_what_is_gated(cols: int, name: str, activation: Callable[[Array], Array]) -> None:
    gate, up = _make_normal(2, cols) * np.float32(4), _make_normal(2, cols, seed=1)
    wanted = activation(gate) * up
    assert np.allclose(getattr(native, name)(gate, up), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "activation"), GATES)
def test_gates_hold_from_the_smallest_to_the_largest_numbers(name: str, activation: Callable[[Array], Array]) -> None:
    gate = _make_wide_range(4096)
    ones = np.ones_like(gate)
    got = getattr(native, name)(gate, ones)
    # In float64 the oracle's 1 + tanh has lost its digits where the result is below 1e-12.
    assert np.allclose(got, activation(gate), rtol=1e-5, atol=1e-12)


def test_silu_is_right_to_a_few_units_in_the_last_place() -> None:
    gate = np.linspace(-80, 80, 100_001, dtype=np.float32)[None]
    error = np.abs(native.silu_mul(gate, np.ones_like(gate)) - _silu(gate))
    assert (error <= 4 * np.spacing(np.abs(_silu(gate)).astype(np.float32))).all()


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_of_infinities_and_nan_are_those_of_the_limits(name: str) -> None:
    gate = np.array([[np.inf, np.nan, 3e38, -3e38, 1.0]], np.float32)
    got = getattr(native, name)(gate, np.ones_like(gate))[0]
    assert got[0] == np.inf
    assert np.isnan(got[1])
    assert got[2] == np.float32(3e38)
    assert got[3] == 0
    assert 0.7 < got[4] < 0.9


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_a_value_has_the_same_bits_wherever_in_a_row_it_stands(name: str) -> None:
    function = getattr(native, name)
    gate, up = _make_normal(1, 100) * np.float32(5), _make_normal(1, 100, seed=1)
    whole = function(gate, up)
    for begin in range(0, 40, 3):
        for end in range(begin + 1, 101, 7):
            part = function(gate[:, begin:end].copy(), up[:, begin:end].copy())
            assert part.tobytes() == whole[:, begin:end].tobytes()


@pytest.mark.parametrize("head_dim", [2, 6, 16, 32, 34, 64, 80, 96, 128, 256])
def test_rotate_turns_pairs_half_a_head_apart(head_dim: int) -> None:
    half = head_dim // 2
    x, angles = _make_normal(3, head_dim), _make_normal(3, half, seed=1).astype(np.float64) * 10
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    wanted = np.concatenate([turned.real, turned.imag], axis=1)
    assert np.allclose(native.rotate(x, cos, sin), wanted, rtol=0, atol=1e-6)


# -- quantize -------------------------------------------------------------------------------------------------------


def _make_padded(x: Array, stride: int) -> Array:
    return np.pad(x, ((0, 0), (0, stride - x.shape[1])))


@pytest.mark.parametrize("cols", COLS)
def test_float32_inputs_are_copied_and_padded_with_zeros(cols: int) -> None:
    x = _make_normal(2, cols)
    got = native.quantize(x, "F32")["f32"]
    assert got.shape[1] % 256 == 0
    assert np.array_equal(got, _make_padded(x, got.shape[1]))


@pytest.mark.parametrize("cols", COLS)
def test_bfloat16_inputs_are_rounded_to_nearest_even(cols: int) -> None:
    x = _make_normal(2, cols)
    x[0, 0] = 1.00390625  # halfway: down to even
    x[1, 0] = 1.01171875  # halfway: up to even
    got = native.quantize(x, "BF16")["bf16"]
    wanted = torch.from_numpy(_make_padded(x, got.shape[1])).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(got.view(np.int16), wanted)


def test_bfloat16_keeps_nan_infinities_and_subnormal_numbers() -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 3.4e38, 1e-40, -0.0]], np.float32)
    x.view(np.uint32)[0, 0] = 0x7F800001  # a NaN that plain rounding would make an infinity
    got = native.quantize(x, "BF16")["bf16"][0, :6].astype(np.uint32) << 16
    values = got.view(np.float32)
    assert np.isnan(values[0])
    assert np.array_equal(values[1:], torch.from_numpy(x[0, 1:]).bfloat16().float().numpy())


@pytest.mark.parametrize("cols", COLS)
def test_int8_groups_have_the_scale_of_their_largest_value(cols: int) -> None:
    x = _make_normal(3, cols)
    x[1, :GROUP] = 0
    got = native.quantize(x, "INT8_GROUP")
    stride = got["q"].shape[1]
    groups = _make_padded(x, stride).reshape(3, -1, GROUP).astype(np.float64)
    assert np.allclose(got["scale"], np.abs(groups).max(axis=2) / 127, rtol=1e-6, atol=0)
    assert got["scale"][1, 0] == 0
    _check_integers(got, groups)


def _check_integers(got: dict[str, Array], groups: Array) -> None:
    q = got["q"].reshape(groups.shape)
    assert np.abs(q.astype(int)).max() <= 127
    scale = got["scale"].astype(np.float64)[..., None]
    assert (np.abs(scale * q - groups) <= scale * 0.50001).all()
    assert np.array_equal(got["sum"], q.sum(axis=2, dtype=np.int32))
    assert np.array_equal(got["half_sum"], got["q"].reshape(len(q), -1, GROUP // 2).sum(axis=2, dtype=np.int32))
    assert np.array_equal(got["scaled_sum"], got["scale"] * got["sum"].astype(np.float32))


@pytest.mark.parametrize("cols", COLS)
def test_int16_is_two_rows_of_int8_the_second_of_what_the_first_leaves(cols: int) -> None:
    x = _make_normal(3, cols)
    x[1, :GROUP] = 0
    got, first = native.quantize(x, "INT16_GROUP"), native.quantize(x, "INT8_GROUP")
    for name, array in first.items():
        assert np.array_equal(got[name][::2], array)
    stride = got["q"].shape[1]
    groups = _make_padded(x, stride).reshape(3, -1, GROUP).astype(np.float64)
    second = {name: array[1::2] for name, array in got.items()}
    step = first["scale"].astype(np.float64)[..., None]
    q = second["q"].reshape(groups.shape)
    values = step * first["q"].reshape(groups.shape) + second["scale"].astype(np.float64)[..., None] * q
    assert (np.abs(values - groups) <= step * 0.51 / 254).all()
    assert np.array_equal(second["sum"], q.sum(axis=2, dtype=np.int32))
    assert np.array_equal(second["scaled_sum"], second["scale"] * second["sum"].astype(np.float32))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_int16_spoils_the_group_of_an_input_that_is_not_a_number_and_no_other(broken: float) -> None:
    x = _make_normal(2, 100)
    wanted = native.quantize(x, "INT16_GROUP")
    x[1, 40] = broken
    got = native.quantize(x, "INT16_GROUP")
    assert np.isnan(got["scale"][2:, 1]).all()
    others = np.arange(got["scale"].shape[1]) != 1
    assert np.array_equal(got["scale"][:, others], wanted["scale"][:, others])


def test_int8_rounds_halves_to_even() -> None:
    x = np.zeros((1, GROUP), np.float32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    assert native.quantize(x, "INT8_GROUP")["q"][0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e20, 8e37])
def test_int8_holds_for_very_small_and_very_large_values(factor: float) -> None:
    x = np.clip(_make_normal(1, GROUP), -4, 4) * np.float32(factor)
    got = native.quantize(x, "INT8_GROUP")
    step = np.abs(x).max() / 127.0
    error = np.abs(got["scale"][:, :1] * got["q"][:, :GROUP].astype(np.float64) - x)
    assert (error <= step * 0.50001).all()


def test_int8_takes_values_near_the_smallest_for_zero() -> None:
    x = np.full((1, GROUP), 1e-39, np.float32)
    got = native.quantize(x, "INT8_GROUP")
    assert not got["q"].any()
    assert got["scale"][0, 0] == 0


@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [32, 47, 48, 63])
def test_int8_groups_that_are_not_finite_have_scale_nan_alone(broken: float, at: int) -> None:
    x = _make_normal(2, 100)
    wanted = native.quantize(x, "INT8_GROUP")
    x[1, at] = broken
    got = native.quantize(x, "INT8_GROUP")
    assert np.isnan(got["scale"][1, 1])
    assert np.isnan(got["scaled_sum"][1, 1])
    others = np.arange(got["scale"].shape[1]) != 1
    assert np.array_equal(got["scale"][1, others], wanted["scale"][1, others])
    assert np.array_equal(got["scale"][0], wanted["scale"][0])


@pytest.mark.parametrize("head_dim", [2, 16, 24, 32, 64, 72, 80, 96, 128, 192, 256, 576])
def test_spread_multiplies_by_a_hadamard_matrix_and_keeps_the_dot_products(head_dim: int) -> None:
    blocks = head_dim // 16
    size = 16 * (blocks & -blocks)  # the largest power of two of blocks
    one = scipy.linalg.hadamard(size) if size else np.zeros((0, 0))
    matrix = scipy.linalg.block_diag(*[one] * (16 * blocks // size if size else 0), np.eye(head_dim % 16))
    keys, queries = _make_normal(5, head_dim), _make_normal(5, head_dim, seed=1)
    assert np.allclose(native.spread(keys, False), keys @ matrix.T, rtol=0, atol=1e-4)
    scores = native.spread(queries, True).astype(np.float64) @ native.spread(keys, False).T
    assert np.allclose(scores, queries.astype(np.float64) @ keys.T, rtol=0, atol=2e-4)
