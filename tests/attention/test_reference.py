import os
import random

import numpy as np
import pytest
import torch

from tureen.attention.base import LayerShape, ModelInput, Span
from tureen.attention.reference import ReferenceAttention

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def cancelling(rng, tokens, heads):
    """Neighbours have equal keys and nearly opposite values: what is left of their sum shows every rounding."""
    half = rng.standard_normal((tokens // 2 + 1, heads, HEAD_DIM))
    keys = np.repeat(half, 2, axis=0)[:tokens]
    values = np.stack((half, 1e-3 * rng.standard_normal(half.shape) - half), axis=1).reshape(-1, heads, HEAD_DIM)[
        :tokens
    ]
    return torch.from_numpy(keys), torch.from_numpy(values)


class Case:
    """Rows with a history in a poisoned pool, and what each new token must attend to."""

    def __init__(self, rows, *, page_size=4, window=None, dtype=torch.float32, seed=0, cancel=False, pictures=None):
        """pictures: of each row, if the layer sees them whole."""
        rng = np.random.default_rng(seed)
        num_pages = sum(-(-(start + length) // page_size) for start, length in rows) + 3
        free = list(range(num_pages))
        random.Random(seed).shuffle(free)
        self.dtype, self.page_size = dtype, page_size
        self.shape = LayerShape(HEADS, KV_HEADS, HEAD_DIM, 0.3, window, sees_pictures_whole=pictures is not None)
        pool_shape = (num_pages, page_size, KV_HEADS, HEAD_DIM)
        self.keys = torch.full(pool_shape, float("nan"), dtype=dtype, device=DEVICE)
        self.values = torch.full(pool_shape, float("nan"), dtype=dtype, device=DEVICE)
        self.rows, first = [], 0
        for index, (start, length) in enumerate(rows):
            pages = tuple(free.pop() for _ in range(-(-(start + length) // page_size)))
            q = self._random(rng, length, HEADS)
            k, v = self._random(rng, start + length, KV_HEADS), self._random(rng, start + length, KV_HEADS)
            if cancel:
                k, v = (tensor.to(DEVICE, dtype) for tensor in cancelling(rng, start + length, KV_HEADS))
            seen_from = 0 if window is None else max(0, start - window + 1)
            for position in range(seen_from, start):
                self.keys[pages[position // page_size], position % page_size] = k[position]
                self.values[pages[position // page_size], position % page_size] = v[position]
            own = pages[seen_from // page_size :]  # those before are given back
            window_pages = () if window is None else own[:1] * (len(pages) - len(own)) + own
            own_pictures = () if pictures is None else pictures[index]
            span = Span(first, length, start, pages, window_pages=window_pages, pictures=own_pictures)
            self.rows.append((span, q, k, v))
            first += length

    def _random(self, rng, tokens, heads):
        return torch.from_numpy(rng.standard_normal((tokens, heads, HEAD_DIM))).to(DEVICE, self.dtype)

    def run(self):
        spans = tuple(span for span, *_ in self.rows)
        positions = torch.cat([torch.arange(span.start, span.start + span.length) for span in spans]).to(DEVICE)
        slots = [
            span.pages[p // self.page_size] * self.page_size + p % self.page_size
            for span in spans
            for p in range(span.start, span.start + span.length)
        ]
        slots = torch.tensor(slots, device=DEVICE)
        inputs = ModelInput(torch.zeros_like(positions), positions, slots, spans, None, window_slots=slots)
        backend = ReferenceAttention([self.shape], [self.keys], [self.values])
        backend.plan(inputs)
        q = torch.cat([q for _, q, _, _ in self.rows])
        k = torch.cat([k[span.start :] for span, _, k, _ in self.rows])
        v = torch.cat([v[span.start :] for span, _, _, v in self.rows])
        return backend.forward(q, k, v, 0)

    def expected(self):
        """Brute force in float64, token by token and head by head."""
        result = []
        for span, q, k, v in self.rows:
            q, k, v = (tensor.double().cpu().numpy() for tensor in (q, k, v))
            for offset in range(span.length):
                position = span.start + offset
                begin = 0 if self.shape.window is None else max(0, position - self.shape.window + 1)
                end = max([position + 1, *(end for start, end in span.pictures if start <= position < end)])
                heads = []
                for head in range(HEADS):
                    kv_head = head // (HEADS // KV_HEADS)
                    scores = k[begin:end, kv_head] @ q[offset, head] * self.shape.scale
                    weights = np.exp(scores - scores.max())
                    heads.append(weights / weights.sum() @ v[begin:end, kv_head])
                result.append(np.concatenate(heads))
        return torch.from_numpy(np.stack(result))


ROWS = {
    "one decode": [(37, 1)],
    "decodes of all lengths": [(length, 1) for length in (0, 1, 3, 4, 17, 300, 511, 512, 513, 1040)],
    "one prefill": [(0, 45)],
    "a long chunk": [(9, 700)],
    "a mixture": [(5, 1), (0, 9), (600, 13), (0, 1), (30, 300), (2, 15), (77, 1), (1, 16)],
}


@pytest.mark.parametrize("window", [None, 1, 7, 520])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_every_token_attends_to_what_it_may_see_and_nothing_else(rows, page_size, window):
    case = Case(rows, page_size=page_size, window=window)
    torch.testing.assert_close(case.run().double().cpu(), case.expected(), atol=2e-6, rtol=2e-5)


PICTURES = (
    [(5, 1), (0, 40), (30, 300), (2, 15), (600, 13)],
    [(), ((3, 9), (9, 35)), ((20, 48), (100, 330)), (), ((590, 613),)],
)


@pytest.mark.parametrize("window", [None, 4, 20])
def test_tokens_of_a_picture_attend_to_all_of_it(window):
    rows, pictures = PICTURES
    case = Case(rows, window=window, pictures=pictures)
    torch.testing.assert_close(case.run().double().cpu(), case.expected(), atol=2e-6, rtol=2e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="bit for bit on CPU only")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_alone_gives_the_same_bits_as_among_others(dtype, window):
    rows = [(5, 1), (0, 9), (600, 13), (0, 1), (30, 300), (2, 15), (700, 1), (1, 16), (530, 1)]
    together = Case(rows, dtype=dtype, window=window, cancel=True)
    results = together.run().split([length for _, length in rows])
    for index, result in enumerate(results):
        together_row = together.rows[index]
        alone = Case([], dtype=dtype, window=window)
        alone.keys, alone.values = together.keys, together.values
        span, *tensors = together_row
        alone.rows = [(span._replace(first=0), *tensors)]
        assert torch.equal(alone.run(), result)


@pytest.mark.skipif(DEVICE != "cpu", reason="bit for bit on CPU only")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_of_any_size_give_the_same_bits(dtype, window):
    whole = Case([(0, 700)], dtype=dtype, window=window, cancel=True)
    expected = whole.run()
    span, q, k, v = whole.rows[0]
    for cuts in ([1, 699], [300, 301, 302, 700], [16, 32, 511, 512, 513], list(range(650, 700))):
        parts = []
        for start, end in zip([0, *cuts], [*cuts, 700], strict=True):
            if start == end:
                continue
            whole.rows = [(Span(0, end - start, start, span.pages), q[start:end], k[:end], v[:end])]
            parts.append(whole.run())
        assert torch.equal(torch.cat(parts), expected)
