"""A recorded Mamba 2 layer against a recurrence in float64, and against itself in other cuts, batches and threads."""

from __future__ import annotations

import numpy as np
import pytest

from tureen.contract.runner import Row

native = pytest.importorskip("tureen.kernels.cpu._native")

NOTHING = np.empty(0, np.float32)
HIDDEN, VOCAB, EPS = 32, 40, 1e-5
PAGE = 64
LAYERS = {
    "one group": {"heads": 3, "head_dim": 16, "state_dim": 8, "groups": 1},
    "odd sizes": {"heads": 4, "head_dim": 37, "state_dim": 5, "groups": 2},
    "wide heads": {"heads": 2, "head_dim": 64, "state_dim": 24, "groups": 2, "kernel": 2},
    "gate last": {"heads": 4, "head_dim": 20, "state_dim": 8, "groups": 2, "gate_last": True},
    "no norm, no biases": {"heads": 4, "head_dim": 20, "state_dim": 8, "groups": 4, "has_norm": False, "biases": False},
    "limits": {"heads": 4, "head_dim": 20, "state_dim": 8, "groups": 2, "limits": (0.5, 0.8)},
    "scales": {"heads": 4, "head_dim": 20, "state_dim": 8, "groups": 2, "scales": (0.7, 1.4), "kernel": 1},
}


class Layer:
    """Random weights of a layer whose decays and time steps differ from head to head."""

    def __init__(
        self,
        heads,
        head_dim,
        state_dim,
        groups,
        kernel=4,
        gate_last=False,
        has_norm=True,
        biases=True,
        limits=(0.0, np.inf),
        scales=(1.0, 1.0),
    ):
        rng = np.random.default_rng(heads * head_dim)
        self.heads, self.head_dim, self.state_dim, self.groups = heads, head_dim, state_dim, groups
        self.width = heads * head_dim
        self.channels = self.width + 2 * groups * state_dim
        self.gate_last, self.has_norm, self.limits, self.scales = gate_last, has_norm, limits, scales

        def make(*shape, size=1.0, is_there=True):
            return (size * rng.standard_normal(shape)).astype(np.float32) if is_there else NOTHING

        self.table = make(VOCAB, HIDDEN)
        self.in_proj = make(self.width + self.channels + heads, HIDDEN, size=0.2)
        self.in_bias = make(len(self.in_proj), size=0.3, is_there=biases)
        self.kernel = make(kernel, self.channels, size=0.6)
        self.bias = make(self.channels, size=0.5, is_there=biases)
        self.decay, self.dt_bias, self.skip = np.exp(make(heads, size=0.6)), make(heads, size=0.6), make(heads)
        self.norm = 1 + make(self.width, size=0.2) if has_norm else NOTHING
        self.out = make(HIDDEN, self.width, size=0.2)
        self.out_bias = make(HIDDEN, is_there=biases)
        self.state_floats = (kernel - 1) * self.channels + self.width * state_dim


def make_tape(layer, threads):
    pool = native.Pool(threads)
    states = native.StatePool(16, 3 + layer.state_floats)
    tape = native.Tape(pool, native.KvCache([(1, 16, -1, False)], 16, PAGE, "float32"), states, HIDDEN, VOCAB)

    def packed(values):
        return native.Matrix.pack(pool, values.view(np.uint8).reshape(-1), "F32", "F32", *values.shape)

    ones = native.Norm(np.ones(HIDDEN, np.float32), EPS, NOTHING, False)
    tape.embed(packed(layer.table), 1.0)
    tape.mamba2(
        module="mamba",
        norm=ones,
        in_proj=packed(layer.in_proj),
        in_bias=layer.in_bias,
        kernel=layer.kernel.reshape(-1),
        bias=layer.bias,
        decay=layer.decay,
        dt_bias=layer.dt_bias,
        skip=layer.skip,
        group_norm=native.Norm(layer.norm, EPS, NOTHING, False),
        gate_last=layer.gate_last,
        gate_scale=layer.scales[0],
        step_scale=layer.scales[1],
        least_step=layer.limits[0],
        most_step=layer.limits[1],
        num_heads=layer.heads,
        head_dim=layer.head_dim,
        state_dim=layer.state_dim,
        num_groups=layer.groups,
        start=3,
        out=packed(layer.out),
        out_bias=layer.out_bias,
        residual_scale=0.7,
    )
    tape.head(norm=ones, matrix=packed(layer.table), bias=NOTHING, scale=1.0, softcap=0.0)
    return tape


def normalised(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(layer, tokens):
    """Returns float64 [tokens, HIDDEN], normalised as by the head."""
    x = layer.table[tokens].astype(np.float64)
    projected = normalised(x) @ layer.in_proj.T.astype(np.float64) + (layer.in_bias if layer.in_bias.size else 0)
    gate, channels, steps = np.split(projected, [layer.width, layer.width + layer.channels], axis=1)
    padded = np.concatenate([np.zeros((len(layer.kernel) - 1, layer.channels)), channels])
    conv = sum(padded[i : i + len(x)] * weights for i, weights in enumerate(layer.kernel))
    conv = silu(conv + (layer.bias if layer.bias.size else 0))
    values = conv[:, : layer.width].reshape(len(x), layer.heads, layer.head_dim)
    keys, queries = (
        part.reshape(len(x), layer.groups, -1).repeat(layer.heads // layer.groups, axis=1)
        for part in np.split(conv[:, layer.width :], 2, axis=1)
    )
    steps = np.log1p(np.exp(steps * layer.scales[1] + layer.dt_bias)).clip(*layer.limits)
    matrices, results = np.zeros((layer.heads, layer.head_dim, layer.state_dim)), []
    for value, key, query, step in zip(values, keys, queries, steps, strict=True):
        taken = (value * step[:, None])[:, :, None] * key[:, None]
        matrices = matrices * np.exp(-layer.decay * step)[:, None, None] + taken
        results.append(np.einsum("hpn,hn->hp", matrices, query) + value * layer.skip[:, None])
    mixed, gate = np.stack(results).reshape(len(x), -1), silu(gate * layer.scales[0])
    mixed = mixed if layer.gate_last else mixed * gate
    if layer.has_norm:
        mixed = normalised(mixed.reshape(len(x), layer.groups, -1)).reshape(len(x), -1) * layer.norm
    mixed = mixed * gate if layer.gate_last else mixed
    out = mixed @ layer.out.T.astype(np.float64) + (layer.out_bias if layer.out_bias.size else 0)
    return normalised(x + 0.7 * out)


def hidden(tape, *rows):
    """Returns the hidden states of each row's tokens."""
    tape.run(rows)
    found = tape.last_hidden(list(range(sum(len(row.token_ids) for row in rows))))
    return np.split(found, np.cumsum([len(row.token_ids) for row in rows])[:-1])


def row(slot, tokens, start=0, state_from=-1, state_to=0, saves=()):
    pages = (slot,)
    return Row(slot, tuple(tokens), start, pages, False, state_from=state_from, state_to=state_to, state_saves=saves)


TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 29)]


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_computes_the_recurrence(name):
    layer = Layer(**LAYERS[name])
    [found] = hidden(make_tape(layer, 1), row(0, TOKENS))
    assert np.abs(found - reference(layer, TOKENS)).max() < 2e-5


@pytest.mark.parametrize("name", LAYERS)
def test_no_bit_depends_on_chunks_company_threads_or_where_a_state_is_kept(name):
    layer = Layer(**LAYERS[name])
    [whole] = hidden(make_tape(layer, 1), row(0, TOKENS))
    tape = make_tape(layer, 3)
    mate = row(1, TOKENS[::-1], state_to=9)
    first = row(0, TOKENS[:8], state_to=1, saves=((1, 3), (5, 4)))
    _, chunk = hidden(tape, mate, first)
    rest = [hidden(tape, row(0, TOKENS[8:9], 8, 1, 2))[0], hidden(tape, row(0, TOKENS[9:], 9, 2, 1), mate)[0]]
    assert np.array_equal(np.concatenate([chunk, *rest]), whole)
    for after, saved in ((1, 3), (5, 4)):
        assert np.array_equal(hidden(tape, row(0, TOKENS[after:], after, saved, 7))[0], whole[after:])


@pytest.mark.parametrize("name", ["in_bias", "out_bias", "bias"])
def test_a_bias_of_another_size_is_refused(name):
    layer = Layer(**LAYERS["limits"])
    setattr(layer, name, getattr(layer, name)[1:].copy())
    with pytest.raises(ValueError, match="bias"):
        make_tape(layer, 1)
