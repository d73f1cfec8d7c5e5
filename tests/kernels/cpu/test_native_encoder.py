"""The native operations on all tokens of a text or picture, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

native = pytest.importorskip("tureen.kernels.cpu._native")

Array = np.ndarray[Any, Any]

ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch.nn.functional.silu,
}


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _pool(threads: int = 2) -> Any:
    return native.Pool(threads, False)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (5, 16384), (3, 20001)])
def test_activations_of_any_number_of_values_are_those_of_float64(name: str, shape: tuple[int, int]) -> None:
    x = _normal(*shape) * np.float32(3)
    wanted = ACTIVATIONS[name](torch.from_numpy(x).double()).numpy()
    native.activate(_pool(), x, name)
    assert np.allclose(x, wanted, rtol=1e-6, atol=4e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_the_largest_numbers_are_their_limits(name: str) -> None:
    x = np.array([[np.inf, 3e38, 20, -20, -3e38, np.nan]], np.float32)
    native.activate(_pool(), x, name)
    assert np.array_equal(x[0, :3], np.array([np.inf, 3e38, 20], np.float32))
    assert np.abs(x[0, 3:5]).max() < 1e-7
    assert np.isnan(x[0, 5])


def test_gelu_is_as_exact_as_float32() -> None:
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)[None]
    wanted = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    native.activate(_pool(), x, "gelu")
    assert np.abs(x - wanted).max() < 4e-7


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no activation mish"):
        native.activate(_pool(), _normal(1, 1), "mish")


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 100), (97, 97), (200, 512), (30, 513), (3, 1100)])
@pytest.mark.parametrize("head_dim", [2, 18, 64, 72])
def test_each_query_attends_to_all_keys(queries: int, keys: int, head_dim: int) -> None:
    q, k, v = _normal(queries, 3, head_dim), _normal(keys, 3, head_dim, seed=1), _normal(keys, 3, head_dim, seed=2)
    out = np.full_like(q, np.nan)
    native.attend_all(_pool(), q, native.SeenTokens(_pool(), k, v), out, 0.3)
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * 0.3
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)
    assert np.abs(out - wanted).max() < 4e-6


def test_attention_reads_and_writes_parts_of_larger_arrays() -> None:
    whole = _normal(50, 3, 5, 16)
    q, k, v = (whole[:, part] for part in range(3))
    seen = native.SeenTokens(_pool(), np.ascontiguousarray(k[:, 1:3]), np.ascontiguousarray(v[:, 1:3]))
    wanted = np.empty((20, 2, 16), np.float32)
    native.attend_all(_pool(), np.ascontiguousarray(q[5:25, 1:3]), seen, wanted, 1.0)
    out = np.zeros((50, 5, 16), np.float32)
    native.attend_all(_pool(), q[5:25, 1:3], native.SeenTokens(_pool(), k[:, 1:3], v[:, 1:3]), out[5:25, 1:3], 1.0)
    assert np.array_equal(out[5:25, 1:3], wanted)
    out[5:25, 1:3] = 0
    assert not out.any()


def test_threads_and_the_other_queries_change_no_bit() -> None:
    q, k, v = (_normal(300, 4, 40, seed=seed) for seed in range(3))
    found = []
    for threads, size in ((1, 300), (2, 300), (3, 7)):
        out = np.empty_like(q)
        seen = native.SeenTokens(_pool(threads), k, v)
        for at in range(0, 300, size):
            native.attend_all(_pool(threads), q[at : at + size], seen, out[at : at + size], 0.2)
        found.append(out.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 3, 8), "other heads"), ((4, 2, 6), "other heads"), ((4, 2, 8, 1), r"queries is not \[tokens")],
)
def test_queries_that_do_not_fit_the_keys_are_refused(shape: tuple[int, ...], message: str) -> None:
    seen = native.SeenTokens(_pool(), _normal(5, 2, 8), _normal(5, 2, 8))
    with pytest.raises(ValueError, match=message):
        native.attend_all(_pool(), _normal(*shape), seen, np.empty(shape, np.float32), 1.0)


LENGTHS = (1, 7, 100, 97, 2, 520, 1100)


def _attended(q, k, v, scale, window=None, biases=None):
    """Attention of one text in float64."""
    k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1).astype(np.float64) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * scale
    distances = np.arange(len(q)) - np.arange(len(q))[:, None]
    if biases is not None:
        scores += biases[:, distances + biases.shape[1] // 2]
    if window is not None:
        scores[:, np.abs(distances) > window] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "has_biases"),
    [(3, 3, 32, None, False), (4, 2, 18, None, False), (2, 2, 64, 12, False), (2, 1, 32, 0, False),
     (3, 3, 16, None, True), (2, 2, 32, 300, True)],
)  # fmt: skip
def test_each_text_attends_to_itself_within_its_window(heads, kv_heads, head_dim, window, has_biases):
    starts = np.cumsum([0, *LENGTHS])
    q = _normal(starts[-1], heads, head_dim)
    kv = _normal(starts[-1], 2, kv_heads, head_dim, seed=1)  # not contiguous, head by head
    biases = _normal(heads, 2 * max(LENGTHS) - 1, seed=2) * np.float32(3) if has_biases else None
    out, alone = np.full_like(q, np.nan), []
    texts = native.Texts(_pool(), starts.tolist(), kv_heads, head_dim, biases)
    for _ in range(2):  # the second time, the memory holds the keys of the first
        texts.attend(q, kv[:, 0], kv[:, 1], out, 0.3, -1 if window is None else window)
    for start, end in itertools.pairwise(starts):
        reach = slice(max(LENGTHS) - (end - start), max(LENGTHS) + (end - start) - 1)
        own = None if biases is None else np.ascontiguousarray(biases[:, reach])
        wanted = _attended(q[start:end], kv[start:end, 0], kv[start:end, 1], 0.3, window, own)
        assert np.abs(out[start:end] - wanted).max() < 4e-6
        one = native.Texts(_pool(3), [0, int(end - start)], kv_heads, head_dim, own)
        alone.append(np.empty_like(q[start:end]))
        one.attend(q[start:end], kv[start:end, 0], kv[start:end, 1], alone[-1], 0.3, -1 if window is None else window)
    assert np.array_equal(np.concatenate(alone), out)


def test_texts_of_another_shape_are_refused():
    x = _normal(5, 2, 8)
    with pytest.raises(ValueError, match="another shape than the texts"):
        native.Texts(_pool(), [0, 4], 2, 8).attend(x, x, x, np.empty_like(x), 1.0)
    with pytest.raises(ValueError, match="another shape than the texts"):
        native.Texts(_pool(), [0, 5], 3, 8).attend(x, x, x, np.empty_like(x), 1.0)
    with pytest.raises(ValueError, match="biases have another number of heads than queries"):
        native.Texts(_pool(), [0, 5], 2, 8, _normal(3, 9)).attend(x, x, x, np.empty_like(x), 1.0)
    with pytest.raises(ValueError, match=r"biases is \[2, 7\], not \[any, 9\]"):
        native.Texts(_pool(), [0, 5], 2, 8, _normal(2, 7))
    with pytest.raises(ValueError, match="starts"):
        native.Texts(_pool(), [0, 5, 3], 2, 8)


def test_arrays_of_another_type_or_order_are_refused() -> None:
    x = _normal(5, 2, 8)
    with pytest.raises(TypeError, match="keys is not float32"):
        native.SeenTokens(_pool(), x.astype(np.float64), x)
    with pytest.raises(ValueError, match="values has another shape"):
        native.SeenTokens(_pool(), x, x[:4])
    with pytest.raises(ValueError, match="the last contiguous"):
        native.SeenTokens(_pool(), x, x.transpose(0, 2, 1))
    with pytest.raises(ValueError, match="there are no keys"):
        native.attend_all(_pool(), x, native.SeenTokens(_pool(), x[:0], x[:0]), np.empty_like(x), 1.0)


@pytest.mark.parametrize("head_dim", [2, 36, 64, 80])
def test_heads_are_rotated_in_place_by_the_angles_of_their_tokens(head_dim: int) -> None:
    whole = _normal(6, 2, 3, head_dim)
    angles = _normal(6, head_dim // 2, seed=1)
    pairs = whole[..., : head_dim // 2].astype(np.float64) + 1j * whole[..., head_dim // 2 :]
    turned = pairs * np.exp(1j * angles.astype(np.float64))[:, None, None]
    kept = whole[:, 1].copy()
    native.rotate_heads(_pool(), whole[:, 0], np.cos(angles), np.sin(angles))
    assert np.allclose(whole[:, 0], np.concatenate([turned.real, turned.imag], axis=-1)[:, 0], atol=1e-6)
    assert np.array_equal(whole[:, 1], kept)


@pytest.mark.parametrize("cols", [1, 16, 33, 1152])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_is_that_of_float64(cols: int, has_bias: bool) -> None:
    x, weight, bias = _normal(3, cols) + np.float32(2), _normal(cols, seed=1), _normal(cols, seed=2)
    wide = torch.from_numpy(x).double()
    added = torch.from_numpy(bias).double() if has_bias else None
    wanted = torch.nn.functional.layer_norm(wide, (cols,), torch.from_numpy(weight).double(), added, 1e-5)
    found = native.layer_norm(_pool(), x, weight, bias if has_bias else None, 1e-5)
    with pytest.raises(TypeError):
        native.layer_norm(_pool(), x, weight, None, 1e-5, wide.numpy())
    assert np.allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cols", [63, 64, 100, 512])
def test_a_product_of_floats_does_not_depend_on_where_the_inputs_lie(cols: int) -> None:
    """Those that fill whole steps of the kernel are not copied."""
    x, weights = _normal(9, cols), _normal(40, cols, seed=1)
    matrix = native.Matrix.pack(_pool(), weights.view(np.uint8).reshape(-1), "F32", "F32", 40, cols)
    found = [native.linear(_pool(threads), x, matrix) for threads in (1, 2, 3)]
    out = np.empty_like(found[0])
    native.linear_range(x, matrix, out, (0, 9), (0, 3))
    assert {one.tobytes() for one in found} == {out.tobytes()}
    assert np.allclose(out, x.astype(np.float64) @ weights.astype(np.float64).T, atol=1e-4)
