"""Attention on the native KV cache, against brute force in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

native = pytest.importorskip("tureen.kernels.cpu._native")

Array = np.ndarray[Any, Any]

DTYPES = ["float32", "bfloat16", "int16", "int8", "int4"]
# Largest error, in units of the largest value: float32 arithmetic; integers round weights to 15 bits.
TOLERANCE = {"float32": 4e-6, "bfloat16": 4e-6, "int16": 3e-4, "int8": 3e-4, "int4": 3e-4}
POISON = 0xFF  # every byte: NaN as float32, as bfloat16 and as the scales of int8
APART = -1  # values are stored, else they are the keys' dimensions from this one on
WHERE = pytest.mark.parametrize("values_from", [APART, 6])


class _Stored(NamedTuple):
    cache: Any
    pages: Array  # int32: of the sequence
    keys: Array  # float64 [tokens, kv_heads, head_dim], as the cache has them
    values: Array  # of tokens, the same; [..., head_dim - values_from] where they are in the keys


def _make_cache(
    layers: int, num_pages: int, page_len: int, kv_heads: int, head_dim: int, dtype: str, values_from: int = APART
) -> Any:
    return native.KvCache([(kv_heads, head_dim, values_from, False)] * layers, num_pages, page_len, dtype)


def _make_stored(
    keys: Array,
    values: Array,
    dtype: str,
    *,
    page_len: int = 16,
    seed: int = 0,
    poison: bool = True,
    values_from: int = APART,
) -> _Stored:
    """A sequence's keys and values [tokens, kv_heads, head_dim], in pages taken in any order, in the second layer of
    three of different shapes."""
    tokens, kv_heads, head_dim = keys.shape
    count = -(-tokens // page_len)
    shapes = [(kv_heads + 1, head_dim // 4 * 2 + 2, APART), (kv_heads, head_dim, values_from), (1, 4, 2)]
    cache = native.KvCache([(*shape, False) for shape in shapes], count + 3, page_len, dtype)
    if poison:
        native.kv_fill(cache, POISON)
    pages = np.random.default_rng(seed).permutation(count + 3)[:count].astype(np.int32)
    loaded_keys, loaded_values = np.empty(keys.shape), np.empty(keys[..., max(0, values_from) :].shape)
    for t in range(tokens):
        for head in range(kv_heads):
            place = (1, int(pages[t // page_len]), t % page_len, head)
            native.kv_store(cache, *place, keys[t, head], values[t, head])
            loaded_keys[t, head], loaded_values[t, head] = native.kv_load(cache, *place)
    return _Stored(cache, pages, loaded_keys, loaded_values)


def _make_normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _make_sequence(
    tokens: int,
    head_dim: int,
    dtype: str,
    *,
    kv_heads: int = 1,
    page_len: int = 16,
    seed: int = 0,
    values_from: int = APART,
) -> _Stored:
    rng = np.random.default_rng(seed)
    keys, values = _make_normal(rng, tokens, kv_heads, head_dim), _make_normal(rng, tokens, kv_heads, head_dim)
    return _make_stored(keys, values, dtype, page_len=page_len, seed=seed, values_from=values_from)


def _make_attention(
    stored: _Stored,
    q: Array,
    num_keys: Any,
    *,
    first_key: Any = 0,
    scale: float = 0.125,
    kv_head: int = 0,
    each_piece: bool = False,
) -> Array:
    count = len(q)
    first = np.broadcast_to(np.asarray(first_key, np.int32), count).copy()
    num = np.broadcast_to(np.asarray(num_keys, np.int32), count).copy()
    out: Array = native.attend(stored.cache, 1, stored.pages, kv_head, q, first, num, scale, each_piece)
    return out


def _brute_force(
    stored: _Stored, q: Array, num_keys: Any, *, first_key: Any = 0, scale: float = 0.125, kv_head: int = 0
) -> Array:
    first, num = np.broadcast_to(first_key, len(q)), np.broadcast_to(num_keys, len(q))
    out = np.empty((len(q), stored.values.shape[2]))
    for j, row in enumerate(q.astype(np.float64)):
        scores = stored.keys[first[j] : num[j], kv_head] @ row * scale
        weights = np.exp(scores - scores.max())
        out[j] = weights @ stored.values[first[j] : num[j], kv_head] / weights.sum()
    return out


def _same_bits(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("head_dim", [2, 16, 38, 64, 256])
def test_float32_keys_and_values_are_read_back_as_stored(head_dim: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 37, 2, head_dim), _make_normal(rng, 37, 2, head_dim)
    stored = _make_stored(keys, values, "float32", page_len=10)
    assert np.array_equal(stored.keys, keys)
    assert np.array_equal(stored.values, values)


@pytest.mark.parametrize("head_dim", [2, 16, 38, 64, 256])
def test_bfloat16_keys_and_values_are_rounded_to_nearest_even(head_dim: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 37, 2, head_dim), _make_normal(rng, 37, 2, head_dim)
    keys[3, 1, :2] = 1.00390625, 1.01171875  # halfway between two bfloat16 numbers
    stored = _make_stored(keys, values, "bfloat16", page_len=10)
    assert np.array_equal(stored.keys, torch.from_numpy(keys).bfloat16().double().numpy())
    assert np.array_equal(stored.values, torch.from_numpy(values).bfloat16().double().numpy())


@pytest.mark.parametrize(
    ("dtype", "key_levels", "value_levels"), [("int16", 8191, 8191), ("int8", 127, 127), ("int4", 127, 7)]
)
@pytest.mark.parametrize("head_dim", [2, 16, 38, 64, 256])
def test_integer_keys_and_values_are_off_by_half_a_step_at_most(
    head_dim: int, dtype: str, key_levels: int, value_levels: int
) -> None:
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 37, 2, head_dim), _make_normal(rng, 37, 2, head_dim)
    keys[5] *= 1e-20
    values[6] *= 1e20
    keys[7] = 0
    stored = _make_stored(keys, values, dtype, page_len=10)
    for got, wanted, levels in ((stored.keys, keys, key_levels), (stored.values, values, value_levels)):
        step = np.abs(wanted).max(axis=2, keepdims=True) / levels
        assert np.all(np.abs(got - wanted) <= step * 0.501)


def test_what_is_stored_last_in_a_place_is_what_is_read() -> None:
    cache = _make_cache(1, 2, 16, 1, 4, "int8")
    for factor in (100, 1):
        native.kv_store(cache, 0, 1, 3, 0, np.full(4, factor, np.float32), np.full(4, -factor, np.float32))
    key, value = native.kv_load(cache, 0, 1, 3, 0)
    assert np.allclose(key, 1)
    assert np.allclose(value, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_two_tokens_share_a_byte(dtype: str) -> None:
    """So threads may store neighbours at the same time."""
    cache = _make_cache(1, 1, 16, 1, 38, dtype)
    written = np.zeros(cache.page(0).shape, int)
    for at in range(16):
        native.kv_fill(cache, 0)
        native.kv_store(cache, 0, 0, at, 0, np.full(38, 1.0, np.float32), np.full(38, -1.0, np.float32))
        written += cache.page(0) != 0
    assert written.any()
    assert written.max() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@WHERE
def test_copies_of_pages_give_the_same_bits(dtype: str, values_from: int) -> None:
    stored = _make_sequence(70, 38, dtype, values_from=values_from)
    q = _make_normal(np.random.default_rng(1), 3, 38)
    wanted = _make_attention(stored, q, 70)
    kept = [bytes(stored.cache.page(page)) for page in stored.pages]
    native.kv_fill(stored.cache, POISON)
    moved = stored._replace(pages=np.roll(stored.pages, 1))
    for page, data in zip(moved.pages, kept, strict=True):
        stored.cache.page(int(page))[:] = np.frombuffer(data, np.uint8)
    assert _same_bits(_make_attention(moved, q, 70), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fresh_cache_is_zero(dtype: str) -> None:
    cache = _make_cache(2, 3, 16, 2, 8, dtype)
    key, value = native.kv_load(cache, 1, 2, 15, 1)
    assert not key.any()
    assert not value.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "values_from"),
    [(head_dim, APART) for head_dim in (2, 6, 16, 38, 64, 80, 96, 128, 256, 512, 576)]
    + [(2, 0), (16, 14), (40, 8), (38, 2), (96, 32), (288, 32), (576, 64)],
)
def test_attention_is_softmax_of_scores_times_values(dtype: str, head_dim: int, values_from: int) -> None:
    stored = _make_sequence(70, head_dim, dtype, values_from=values_from)
    rng = np.random.default_rng(1)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 13):
        q = _make_normal(rng, count, head_dim)
        num = rng.integers(1, 71, count)
        scale = head_dim**-0.5
        error = _make_attention(stored, q, num, scale=scale) - _brute_force(stored, q, num, scale=scale)
        allowed = TOLERANCE[dtype] * max(1, head_dim / 256)  # the more there are, the fewer bits an integer has
        assert np.abs(error).max() <= allowed * np.abs(stored.values).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_keys", [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1299])
@WHERE
def test_every_number_of_keys_is_attended_to_the_last(dtype: str, num_keys: int, values_from: int) -> None:
    stored = _make_sequence(num_keys, 64, dtype, values_from=values_from)
    q = _make_normal(np.random.default_rng(1), 3, 64)
    error = _make_attention(stored, q, num_keys) - _brute_force(stored, q, num_keys)
    assert np.abs(error).max() <= TOLERANCE[dtype] * np.abs(stored.values).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_len", [1, 5, 16, 20, 48, 1024])
@WHERE
def test_page_lengths_change_no_bit(dtype: str, page_len: int, values_from: int) -> None:
    q = _make_normal(np.random.default_rng(1), 9, 64)
    num = np.arange(592, 601)
    usual = _make_attention(_make_sequence(600, 64, dtype, values_from=values_from), q, num)
    stored = _make_sequence(600, 64, dtype, page_len=page_len, values_from=values_from)
    assert _same_bits(_make_attention(stored, q, num), usual)


@pytest.mark.parametrize("dtype", DTYPES)
@WHERE
def test_each_kv_head_has_its_own_keys_and_values(dtype: str, values_from: int) -> None:
    stored = _make_sequence(90, 32, dtype, kv_heads=3, values_from=values_from)
    q = _make_normal(np.random.default_rng(1), 4, 32)
    for head in range(3):
        error = _make_attention(stored, q, 90, kv_head=head) - _brute_force(stored, q, 90, kv_head=head)
        assert np.abs(error).max() <= TOLERANCE[dtype] * np.abs(stored.values).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 17, 100, 512, 700])
@WHERE
def test_a_window_hides_the_keys_before_it(dtype: str, window: int, values_from: int) -> None:
    stored = _make_sequence(1200, 64, dtype, values_from=values_from)
    rng = np.random.default_rng(1)
    q = _make_normal(rng, 11, 64)
    num = rng.integers(1, 1201, 11)
    num[:6] = np.arange(900, 906)
    first = np.maximum(num - window, 0)
    error = _make_attention(stored, q, num, first_key=first) - _brute_force(stored, q, num, first_key=first)
    assert np.abs(error).max() <= TOLERANCE[dtype] * np.abs(stored.values).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_before_the_window_are_not_read(dtype: str) -> None:
    stored = _make_sequence(1200, 64, dtype)
    q = _make_normal(np.random.default_rng(1), 3, 64)
    wanted = _make_attention(stored, q, 1200, first_key=1100)
    gone = stored._replace(pages=np.where(np.arange(75) < 1100 // 16, -1, stored.pages).astype(np.int32))
    assert _same_bits(_make_attention(gone, q, 1200, first_key=1100), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_len", [16, 20])
@WHERE
def test_a_query_vector_gets_the_same_bits_alone_and_among_others(dtype: str, page_len: int, values_from: int) -> None:
    """Prefill gives many at once, decode the few of one token: neither may show."""
    stored = _make_sequence(1100, 64, dtype, page_len=page_len, values_from=values_from)
    rng = np.random.default_rng(1)
    count = 40
    q = _make_normal(rng, count, 64)
    num = np.concatenate([np.repeat(np.arange(500, 510), 3), rng.integers(1, 1101, 10)]).astype(np.int32)
    first = np.maximum(num - 600, 0)
    together = _make_attention(stored, q, num, first_key=first)
    for size in (1, 2, 3, 5, 6, 8, 17):
        parts = [
            _make_attention(stored, q[i : i + size], num[i : i + size], first_key=first[i : i + size])
            for i in range(0, count, size)
        ]
        assert _same_bits(np.concatenate(parts), together)
    order = rng.permutation(count)
    mixed = _make_attention(stored, q[order], num[order], first_key=first[order])
    assert _same_bits(mixed, together[order])


@pytest.mark.parametrize("dtype", DTYPES)
@WHERE
def test_pieces_computed_apart_and_merged_give_the_same_bits(dtype: str, values_from: int) -> None:
    """So threads may share the keys of one sequence."""
    stored = _make_sequence(2100, 64, dtype, values_from=values_from)
    rng = np.random.default_rng(1)
    q = _make_normal(rng, 14, 64)
    num = np.concatenate([[1, 512, 513, 1025, 2048, 2100], rng.integers(1, 2101, 8)])
    for window in (700, 3000):
        first = np.maximum(num - window, 0)
        wanted = _make_attention(stored, q, num, first_key=first)
        assert _same_bits(_make_attention(stored, q, num, first_key=first, each_piece=True), wanted)
        assert np.isfinite(wanted).all()


@pytest.mark.parametrize("dtype", DTYPES)
@WHERE
def test_what_lies_in_places_of_others_does_not_show(dtype: str, values_from: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 530, 1, 64), _make_normal(rng, 530, 1, 64)
    q = _make_normal(rng, 8, 64)
    num = np.arange(523, 531)
    outputs = [
        _make_attention(_make_stored(keys, values, dtype, poison=poison, values_from=values_from), q, num)
        for poison in (False, True)
    ]
    assert np.isfinite(outputs[0]).all()
    assert _same_bits(*outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
@WHERE
def test_a_broken_token_reaches_only_those_that_see_it(dtype: str, broken: float, values_from: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 40, 1, 64), _make_normal(rng, 40, 1, 64)
    q = _make_normal(rng, 12, 64)
    num = np.arange(29, 41)
    wanted = _make_attention(_make_stored(keys, values, dtype, values_from=values_from), q, num)
    for array in (keys, values):
        array[34] = broken  # seen by those of 35 keys and more
    got = _make_attention(_make_stored(keys, values, dtype, values_from=values_from), q, num)
    assert _same_bits(got[num <= 34], wanted[num <= 34])
    assert np.isnan(got[num > 34]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@WHERE
def test_a_query_vector_that_is_nan_gives_nan_to_itself_alone(dtype: str, values_from: int) -> None:
    stored = _make_sequence(40, 64, dtype, values_from=values_from)
    q = _make_normal(np.random.default_rng(1), 5, 64)
    wanted = _make_attention(stored, q, 40)
    q[2, 7] = np.nan
    got = _make_attention(stored, q, 40)
    assert np.isnan(got[2]).all()
    others = [0, 1, 3, 4]
    assert _same_bits(got[others], wanted[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart_do_not_overflow(dtype: str) -> None:
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 600, 1, 64), _make_normal(rng, 600, 1, 64)
    stored = _make_stored(keys * np.float32(1e6), values, dtype)
    q = _make_normal(rng, 4, 64) * np.float32(1e6)
    best = (stored.keys[:, 0] @ q.T.astype(np.float64)).argmax(axis=0)
    assert np.abs(_make_attention(stored, q, 600) - stored.values[best, 0]).max() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_gives_its_value(dtype: str) -> None:
    stored = _make_sequence(1, 64, dtype)
    q = _make_normal(np.random.default_rng(1), 3, 64) * np.float32(30)
    assert np.abs(_make_attention(stored, q, 1) - stored.values[0]).max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_vectors_and_values_of_zeros_are_no_special_case(dtype: str) -> None:
    rng = np.random.default_rng(0)
    keys = _make_normal(rng, 50, 1, 16)
    stored = _make_stored(keys, np.zeros_like(keys), dtype)
    assert not _make_attention(stored, _make_normal(rng, 2, 16), 50).any()
    stored = _make_sequence(50, 16, dtype)
    mean = stored.values[:, 0].mean(axis=0)
    assert np.abs(_make_attention(stored, np.zeros((2, 16), np.float32), 50) - mean).max() <= 1e-4


@pytest.mark.parametrize("dtype", ["int16", "int8", "int4"])
def test_integers_keep_weights_that_are_small_beside_the_largest(dtype: str) -> None:
    """One key takes most of the attention, as first tokens do; a thousand others share the rest."""
    rng = np.random.default_rng(0)
    keys, values = _make_normal(rng, 512, 1, 64) * np.float32(0.1), _make_normal(rng, 512, 1, 64) + np.float32(3)
    q = np.ones((1, 64), np.float32)
    keys[0] = 6.0 / 8  # e^6 times the weight of the others
    values[0] = 0.01
    stored = _make_stored(keys, values, dtype)
    wanted = _brute_force(stored, q, 512)
    assert np.abs(_make_attention(stored, q, 512) - wanted).max() <= 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["int16", "int8", "int4"])
@pytest.mark.parametrize(("head_dim", "values_from"), [(64, APART), (256, APART), (576, APART), (64, 6), (576, 64)])
def test_sums_of_the_largest_integers_do_not_overflow(dtype: str, head_dim: int, values_from: int) -> None:
    """All products have one sign and the largest size, in the scores and in the sums of 512 values."""
    for sign in (1, -1):
        keys = np.full((512, 1, head_dim), sign, np.float32)
        stored = _make_stored(keys, keys, dtype, values_from=values_from)
        q = np.ones((2, head_dim), np.float32)
        wanted = _brute_force(stored, q, 512)
        assert np.abs(_make_attention(stored, q, 512) - wanted).max() <= 1e-3


def test_a_score_of_int16_is_as_exact_as_13_bits_allow() -> None:
    """Two keys, told apart by what bfloat16 would round away."""
    keys = np.ones((2, 1, 64), np.float32)
    keys[1, 0, 1:] += 1 / 1024
    values = np.zeros((2, 1, 64), np.float32)
    values[1] = 1
    q = np.full((1, 64), 8, np.float32)
    stored = _make_stored(keys, values, "int16")
    score = 63 * 8 / 1024 / 8
    got = _make_attention(stored, q, 2)
    assert np.abs(got - 1 / (1 + np.exp(-score))).max() <= 4e-3


def test_bytes_per_token_count_keys_and_values_of_all_layers() -> None:
    sizes = {"float32": 2 * 64 * 4, "int16": 2 * 66 * 2, "int8": 2 * 68, "int4": 68 + 36}
    for dtype, each in sizes.items():
        size = 5 * 3 * each
        cache = _make_cache(5, 7, 16, 3, 64, dtype)
        assert cache.bytes_per_token == size
        assert cache.nbytes == size * 7 * 16


def test_bytes_per_token_count_each_layer_by_its_own_shape_and_no_values_that_are_in_keys() -> None:
    cache = native.KvCache([(3, 64, APART, False), (1, 576, 64, False), (2, 32, APART, False)], 7, 16, "float32")
    assert cache.bytes_per_token == 4 * (2 * 3 * 64 + 576 + 2 * 2 * 32)


def test_layers_with_a_window_have_pages_of_their_own_if_there_are_window_pages() -> None:
    layers = [(3, 64, APART, True), (2, 32, APART, False), (1, 16, APART, True)]
    cache = native.KvCache(layers, 7, 16, "float32", num_window_pages=5)
    assert (cache.bytes_per_token, cache.window_bytes_per_token) == (4 * 2 * 2 * 32, 4 * 2 * (3 * 64 + 16))
    assert cache.nbytes == 16 * (7 * cache.bytes_per_token + 5 * cache.window_bytes_per_token)
    sizes = {0: 64, 1: 32, 2: 16}
    places = [(layer, page) for layer in sizes for page in (4, 6) if layer == 1 or page < 5]
    for layer, page in places:
        native.kv_store(cache, layer, page, 3, 0, *np.full((2, sizes[layer]), 10 * layer + page, np.float32))
    for layer, page in places:
        assert {*native.kv_load(cache, layer, page, 3, 0)[0]} == {10 * layer + page}
    with pytest.raises(IndexError, match="page is 5 of 5"):
        native.kv_load(cache, 2, 5, 3, 0)
    together = native.KvCache(layers, 7, 16, "float32")
    assert (together.bytes_per_token, together.window_bytes_per_token) == (4 * 2 * (2 * 32 + 3 * 64 + 16), 0)


def test_pages_that_nobody_wrote_take_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    cache = _make_cache(4, 20000, 16, 4, 128, "float32")
    assert cache.nbytes > 4 << 30
    native.kv_store(cache, 3, 19999, 15, 3, np.ones(128, np.float32), np.ones(128, np.float32))
    assert resident() - before < 64 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"head_dim": 63}, "head_dim"),
        ({"head_dim": 578}, "head_dim"),
        ({"layers": 0}, "layers"),
        ({"values_from": -2}, "values_from"),
        ({"values_from": 64}, "values_from"),
        ({"values_from": 3}, "values_from"),
        ({"page_len": 0}, "page_len"),
        ({"page_len": 1025}, "page_len"),
        ({"num_pages": 0}, "num_pages"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"layers": 1, "num_pages": 1, "page_len": 16, "kv_heads": 1}
    given |= {"head_dim": 64, "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        _make_cache(**(given | change))


def test_places_outside_of_the_cache_are_refused() -> None:
    cache = _make_cache(1, 2, 16, 1, 4, "float32")
    zeros = np.zeros(4, np.float32)
    for place in ((1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 16, 0), (0, 0, 0, 1), (0, -1, 0, 0)):
        with pytest.raises(IndexError):
            native.kv_store(cache, *place, zeros, zeros)
