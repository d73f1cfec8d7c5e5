"""The sampling pipeline once more, one row at a time, in float64 numpy, from the documentation. An oracle for tests."""

import math
from collections import Counter

import numpy as np

from tureen.contract.params import SamplingParams
from tureen.contract.runner import SlotState
from tureen.contract.types import NO_TOKEN


def make_state(slot=0, *, seed=0, prompt=(1, 2, 3), output=(), ends=(), logprobs=None, banned=(), **params):
    return SlotState(
        slot, SamplingParams(**params), seed, tuple(prompt), tuple(output), tuple(ends), logprobs, banned=tuple(banned)
    )


def make_logits(seed, vocab_size, *, scale=3.0, grid=None, rows=None):
    """Float32 logits; with a grid, many of them are equal."""
    shape = vocab_size if rows is None else (rows, vocab_size)
    logits = np.random.default_rng(seed).normal(0, scale, shape)
    return (np.round(logits / grid) * grid if grid else logits).astype(np.float32)


def processed_logits(logits, state):
    """The row after the stages that change logits. Stored as float32 between the stages."""
    p = state.params
    logits = logits.astype(np.float32).copy()
    seen = [*state.prompt_ids, *state.output_ids]
    first = 0 if p.repeat_last_n < 0 else max(0, len(seen) - p.repeat_last_n)
    counts = Counter(seen[max(first, len(state.prompt_ids)) :])

    def change(token, value):
        logits[token] = np.float32(min(value, float(np.finfo(np.float32).max)))

    for token, count in counts.items():
        change(token, float(logits[token]) - count * p.frequency_penalty)
    for token in counts:
        change(token, float(logits[token]) - p.presence_penalty)
    if p.repetition_penalty not in (0.0, 1.0):
        for token in set(seen[first:]) - {NO_TOKEN}:
            old = float(logits[token])
            change(token, old / p.repetition_penalty if old > 0 else old * p.repetition_penalty)
    if len(state.output_ids) < p.min_new_tokens:
        logits[list(state.end_token_ids)] = -np.inf
    for token, bias in p.logit_bias.items():
        change(token, float(logits[token]) + bias)
    return logits


def log_softmax(logits, temperature=1.0):
    wide = (logits.astype(np.float64) - logits.max()) / temperature
    return wide - math.log(math.fsum(np.exp(wide)))


def kept_probabilities(logits, params):
    """Probabilities [vocab] of processed logits, 0 where cut; and how near any cut was to going the other way."""
    probabilities = np.exp(log_softmax(logits, params.temperature))
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    ranked = probabilities[order]
    kept, margin = len(order), math.inf
    if params.top_k > 0:
        kept = min(kept, params.top_k)
    if params.top_p < 1.0:
        cumulative = np.cumsum(ranked)
        kept = min(kept, int(np.argmax(cumulative >= params.top_p)) + 1 if cumulative[-1] >= params.top_p else kept)
        margin = min(margin, float(np.abs(cumulative - params.top_p).min()))
    if params.min_p > 0.0:
        kept = min(kept, int((ranked >= params.min_p * ranked[0]).sum()))
        others = ranked[ranked < ranked[0]]
        if len(others):
            margin = min(margin, float(np.abs(others / ranked[0] - params.min_p).min()))
    probabilities[order[kept:]] = 0.0
    if params.typical_p < 1.0:
        probabilities, distance = _typical(probabilities, params.typical_p)
        margin = min(margin, distance)
    return probabilities, margin


def _typical(probabilities, mass):
    """Locally typical sampling, word for word: tokens are taken in the order of their distance from the entropy until
    the mass is reached; those as far as the last one are taken too."""
    shares = probabilities / math.fsum(probabilities)
    possible = [int(token) for token in np.flatnonzero(shares)]
    entropy = -math.fsum(shares[token] * math.log(shares[token]) for token in possible)
    distance = {token: abs(-math.log(shares[token]) - entropy) for token in possible}
    taken, reached, margin, furthest = 0.0, False, math.inf, 0.0
    for token in sorted(possible, key=distance.__getitem__):
        if reached and distance[token] > furthest + 1e-12:
            break
        taken += shares[token]
        furthest = distance[token]
        margin = min(margin, abs(taken - mass))
        reached = taken >= mass
    typical = [token for token in possible if distance[token] <= furthest + 1e-12]
    gaps = np.diff(sorted(distance.values()))
    gaps = gaps[gaps > 1e-12]
    margin = min(margin, float(gaps.min()) if len(gaps) else math.inf)
    kept = np.zeros_like(probabilities)
    kept[typical] = probabilities[typical]
    return kept, margin


def draw(logits, state, uniform):
    """The token, and how near (as a probability) the draw was to another token."""
    processed = processed_logits(logits, state)
    if state.params.is_greedy:
        return int(np.argmax(processed)), math.inf
    probabilities, margin = kept_probabilities(processed, state.params)
    ends = np.cumsum(probabilities / math.fsum(probabilities))
    possible = np.flatnonzero(probabilities)
    reached = possible[ends[possible] > uniform]
    token = int(reached[0]) if len(reached) else int(possible[-1])
    inner = ends[possible[:-1]]
    return token, min(margin, float(np.abs(inner - uniform).min()) if len(inner) else math.inf)
