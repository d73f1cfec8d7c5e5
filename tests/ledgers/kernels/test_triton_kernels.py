"""Gate (a): each Triton kernel, in the interpreter, computes what its reference does, and a row as it does alone.

bfloat16 is for a GPU: the interpreter of triton 3.6 multiplies it wrongly.
"""

import random

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  before the kernels

from tureen.kernels.triton import activation, attention, linear, norm, rope_store, sample
from tureen.sampling import probability
from tureen.sampling.probability import softmax_weights
from tureen.sampling.random import uniform

GUARDS = ("tureen/kernels/triton/*", "tureen/sampling/probability.py", "tureen/sampling/random.py")

DTYPES = {"float32": torch.float32, "float16": torch.float16}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
SEEDS = range(6)
NAN = float("nan")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Memory that a kernel should not read holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: poisoned(empty(*shape, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda like: empty(like.shape, dtype=like.dtype).fill_(NAN))


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=SEEDS)
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def poisoned(tensor):
    return tensor.fill_(NAN if tensor.is_floating_point() else -77)


def assert_near(result, expected):
    assert result.dtype == expected.dtype
    torch.testing.assert_close(
        result, expected, atol=TOLERANCE[result.dtype], rtol=TOLERANCE[result.dtype], equal_nan=False
    )


def test_a_norm_with_and_without_a_residual(rng, dtype):
    rows, size = rng.randint(1, 9), rng.choice([1, 64, 100, 2048, rng.randint(2, 3000)])
    x, added, weight = torch.randn(rows, size, dtype=dtype), torch.randn(rows, size, dtype=dtype), torch.randn(size)
    assert_near(norm.add_norm(x, None, weight, 1e-5), norm.reference(x, None, weight, 1e-5))
    own, other = x.clone(), x.clone()
    result = norm.add_norm(own, added, weight, 1e-6, 0.7)
    assert_near(result, norm.reference(other, added, weight, 1e-6, 0.7))
    assert_near(own, other)
    alone = x[-1:].clone()
    assert torch.equal(norm.add_norm(alone, added[-1:], weight, 1e-6, 0.7)[0], result[-1])
    assert torch.equal(alone[0], own[-1])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("function", activation.FUNCTIONS)
def test_a_gated_activation(rng, dtype, function):
    rows, size = rng.randint(1, 9), rng.choice([1, 100, 1024, rng.randint(2, 3000)])
    x = torch.randn(rows, 2 * size, dtype=dtype) * 4
    x[0, 0], x[-1, 0] = 200.0, -200.0  # exp of one of them is beyond float32
    result = activation.activate_and_mul(x, function)
    assert_near(result, activation.reference(x.clone(), function))
    assert torch.equal(activation.activate_and_mul(x[-1:].clone(), function)[0], result[-1])


def test_queries_and_keys_are_normalised_rotated_and_stored(rng, dtype):
    keys = rng.choice([1, 2, 3])
    heads = rope_store.Heads(keys * rng.choice([1, 2, 4]), keys, rng.choice([64, 80, 96, 128, 256]))
    rotated, tokens, page = heads.size // rng.choice([1, 2]), rng.randint(1, 9), rng.choice([1, 4, 16])
    angles = torch.randn(tokens, rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    rope = rope_store.Rope(torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1), rng.random() < 0.5)
    weights = torch.randn(heads.size), torch.randn(heads.size)
    norms = rope_store.HeadNorms(*weights, 1e-6) if rng.random() < 0.7 else None
    qkv = torch.randn(tokens, (heads.queries + 2 * keys) * heads.size, dtype=dtype)
    slots = torch.randperm(10 * page + 10)[:tokens]
    slots[slots >= 10 * page] = -1  # rows that fill up a step

    def store(function, rows):
        pages = tuple([torch.full((10, page, keys, heads.size), 7.0, dtype=dtype) for _ in range(2)])
        turned = rope._replace(cos=rope.cos[rows], sin=rope.sin[rows])
        return function(qkv[rows], heads, turned, norms, slots[rows], pages), *pages

    everything = slice(None)
    for result, expected in zip(
        store(rope_store.rope_store, everything), store(rope_store.reference, everything), strict=True
    ):
        assert_near(result, expected)
    queries, _, _ = store(rope_store.rope_store, slice(tokens - 1, tokens))
    assert torch.equal(queries[0], store(rope_store.rope_store, everything)[0][-1])


def _product(rng, dtype):
    """Returns rows, a weight and perhaps a bias whose product needs one part of the inputs or several."""
    rows, inputs = rng.choice([1, 5, 17, 40]), rng.choice([64, 100, 1024, 1536])
    outputs = rng.choice([33, 64, 130])
    weight = torch.randn(outputs, inputs, dtype=dtype) / inputs**0.5
    bias = torch.randn(outputs, dtype=dtype) if rng.random() < 0.5 else None
    return torch.randn(rows, inputs, dtype=dtype), weight, bias


def test_a_product_with_a_weight(rng, dtype):
    x, weight, bias = _product(rng, dtype)
    result = linear.linear(x, weight, bias)
    assert_near(result, linear.reference(x, weight, bias))
    assert torch.equal(linear.linear(x[-1:], weight, bias)[0], result[-1])
    assert torch.equal(linear.linear(torch.cat((x, torch.randn_like(x))), weight, bias)[: len(x)], result)


def test_an_order_of_sums_that_depends_on_the_rows_is_noticed(monkeypatch):
    tile_of = linear.tile_of

    def of_rows(outputs, inputs, rows):
        tile = tile_of(outputs, inputs, rows)
        return tile if rows > 1 else tile._replace(parts=1, steps=tile.parts * tile.steps)

    x, weight = torch.randn(3, 1024), torch.randn(64, 1024)
    assert torch.equal(linear.linear(x[:1], weight), linear.linear(x, weight)[:1])
    monkeypatch.setattr(linear, "tile_of", of_rows)
    assert not torch.equal(linear.linear(x[:1], weight), linear.linear(x, weight)[:1])


@pytest.mark.parametrize("size", [5, 256, 300, 66000, 140000])
def test_draws_are_those_of_the_sampler_for_the_same_seed(size):
    """The same tokens as `sampling/probability.py` draws, whose weights the same exponential makes here."""
    torch.manual_seed(size)
    logits = torch.randn(6, size) * 3
    logits[1, ::2] = -torch.inf
    peaks = logits.amax(dim=1)
    temperatures = torch.tensor([1.0, 0.3, 2.0, 1.5, 0.01, 1.0], dtype=torch.float64)
    seeds, positions = [1, 2**63 + 5, 2**64 - 3, 7, 8, 9], [0, 5, 2**33 + 1, 100, 3, 77]
    own_seeds = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))
    uniforms = sample.uniforms(own_seeds, torch.tensor(positions))
    assert uniforms.tolist() == uniform(seeds, positions).tolist()
    weights = softmax_weights(logits, peaks, temperatures)
    expected = probability.draw(weights, uniforms)
    drawn = sample.draw(logits, peaks, temperatures, uniforms)
    assert torch.equal(drawn.token_ids, expected)
    above = logits.gather(1, expected[:, None])[:, 0].double() - peaks.double()
    torch.testing.assert_close(drawn.logprobs, above / temperatures - weights.totals.log(), rtol=1e-14, atol=1e-14)
    alone = sample.draw(*(each[2:3] for each in (logits, peaks, temperatures, uniforms)))
    assert torch.equal(alone.token_ids, drawn.token_ids[2:3])
    assert torch.equal(alone.logprobs, drawn.logprobs[2:3])
    assert torch.equal(sample.reference(logits, peaks, temperatures, uniforms).token_ids, expected)


class Sequences:
    """Rows of random tokens over pages; what no query sees is NaN."""

    def __init__(self, rng, dtype, shape, rows, page):
        """rows: the first position and the number of tokens of each."""
        self.shape, self.sinks = shape, None
        needed = [-(-(start + length) // page) for start, length in rows]
        free = list(range(sum(needed) + 2))
        rng.shuffle(free)
        sizes = len(free), page, shape.num_kv_heads, shape.head_dim
        self.pages = tuple([torch.full(sizes, NAN, dtype=dtype) for _ in range(2)])
        self.own, self.spans, first = [], [], 0
        for (start, length), count in zip(rows, needed, strict=True):
            mine = [free.pop() for _ in range(count)]
            seen = torch.arange(0 if shape.window is None else max(0, start - shape.window + 1), start + length)
            for pages in self.pages:
                pages[torch.tensor(mine)[seen // page], seen % page] = torch.randn(len(seen), *sizes[2:]).to(dtype)
            self.own.append(mine)
            self.spans.append((first, length, start))
            first += length
        self.q = torch.randn(first, shape.num_heads, shape.head_dim).to(dtype)
        table = torch.full((len(rows), max(needed)), 1 << 30, dtype=torch.int32)  # beyond all pages
        for row, mine in zip(table, self.own, strict=True):
            row[: len(mine)] = torch.tensor(mine)
        self.tables = attention.Tables(table, torch.arange(len(rows)))

    def prefill(self, spans, q, rows=None):
        """Attends with queries q of the rows `rows`, all by default, cut as `spans` has them."""
        tiles = attention.prefill_tiles(self.shape, spans)
        places = attention.Tiles(torch.tensor(tiles, dtype=torch.int32), len(tiles))
        tables = self.tables if rows is None else self.tables._replace(rows=torch.tensor(rows))
        return attention.prefill(q, self.pages, tables, places, self.shape, self.sinks)


SHAPES = {
    "plain": attention.Shape(4, 2, 64, 0.125),
    "alone": attention.Shape(2, 2, 256, 0.06),
    "window": attention.Shape(8, 1, 128, 0.1, window=600),
    "short-window": attention.Shape(6, 2, 80, 0.1, window=37, softcap=5.0),
    "softcap": attention.Shape(3, 1, 96, 0.1, softcap=2.0),
}
ROWS = [(0, 5), (513, 3), (1030, 40), (7, 1), (511, 2), (0, 1)]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_paged_attention_in_one_piece_in_chunks_alone_and_token_by_token(name, has_sinks, dtype):
    torch.manual_seed(len(name))
    rng, shape = random.Random(name), SHAPES[name]
    case = Sequences(rng, dtype, shape, ROWS, rng.choice([1, 16, 32]))
    case.sinks = torch.randn(shape.num_heads) if has_sinks else None
    whole = case.prefill(case.spans, case.q)
    assert_near(whole, attention.reference(case.q, case.pages, case.own, case.spans, shape, case.sinks))
    last = torch.tensor([first + length - 1 for first, length, _ in case.spans])
    positions = torch.tensor([start + length - 1 for _, length, start in case.spans])
    drawn = attention.decode(case.q[last], case.pages, case.tables, positions, 4, shape, case.sinks)
    assert torch.equal(drawn, whole[last])
    alone = case.tables._replace(rows=torch.tensor([2]))
    one = attention.decode(case.q[last[2:3]], case.pages, alone, positions[2:3], 3, shape, case.sinks)
    assert torch.equal(one[0], whole[last[2]])
    first, length, start = case.spans[2]
    for begin, end in ((0, 17), (17, length)):
        chunk = case.prefill([(0, end - begin, start + begin)], case.q[first + begin : first + end], [2])
        assert torch.equal(chunk, whole[first + begin : first + end])
