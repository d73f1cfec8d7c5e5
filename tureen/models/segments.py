"""Cuts a decoder into segments, of which ranks compute equally many: heads, inner sizes of mlps, vocabulary. No torch.

What a segment is depends on the model alone, never on the number of ranks. So each product has the same shape, and each
sum the same order, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tureen.models.config import ModelConfig

NUM_SEGMENTS = 8
RANKS = (1, 2, 4, 8)
"""Numbers of ranks among which the segments are shared out, so that each rank has one subtree of their sums."""


class Segment(NamedTuple):
    """A share of every layer. `heads` may be empty: a model may have less of them than there are segments."""

    number: int
    heads: range
    kv_heads: range  # those that the heads attend to: whole groups, or one, which other segments may have too


def segments_of(config: ModelConfig, rank: int, num_ranks: int) -> list[Segment]:
    """Returns the segments that a rank computes."""
    each = NUM_SEGMENTS // num_ranks
    return [_segment(config, index) for index in range(rank * each, (rank + 1) * each)]


def share(size: int, index: int) -> range:
    """Returns the places of `size` that belong to a segment."""
    return range(size * index // NUM_SEGMENTS, size * (index + 1) // NUM_SEGMENTS)


def why_not(config: ModelConfig, num_ranks: int) -> str:
    """Returns why `num_ranks` ranks cannot compute the model, and which numbers can; "" if they can."""
    if config.qk_norm == "all":
        return "the model normalises all heads together, which no rank has; leave it out"
    if config.state_floats or config.parts:
        return "ranks do not share out the model's recurrent layers, or layers with one part; leave it out"
    if config.keys or config.layer_inputs is not None or config.mlp_sizes:
        return "the model's layers differ in their heads or share keys, which ranks do not share out; leave it out"
    if config.latent is not None:
        return "ranks do not share out the model's latent attention; leave it out"
    if config.has_gate:
        return "the model's heads have gates, which ranks do not share out; leave it out"
    if config.head_bias:
        return "the model's head has a bias, which ranks do not share out; leave it out"
    small = next((f"{name} {size}" for name, size in _sizes(config) if size < NUM_SEGMENTS), "")
    if small:
        return f"the model's {small} cannot be cut into {NUM_SEGMENTS} segments; leave it out"
    if num_ranks in RANKS and _has_heads(config, num_ranks):
        return ""
    allowed = " or ".join(str(number) for number in RANKS if _has_heads(config, number))
    return f"the model's {config.num_heads} attention heads are shared out among {allowed} ranks; use one of these"


def cut(config: ModelConfig, segment: Segment, name: str) -> tuple[slice, ...]:
    """Returns the index of a segment's part of a weight of `ModelConfig.weights`; of one that every segment needs, all
    of it."""
    module = name.rsplit(".", 2)[-2]
    if name.endswith(".sinks"):
        return (_scaled(segment.heads, 1),)
    if module in ("q_proj", "o_proj"):
        places = _scaled(segment.heads, config.head_dim)
    elif module in ("k_proj", "v_proj"):
        places = _scaled(segment.kv_heads, config.head_dim)
    elif module in ("gate_proj", "up_proj", "down_proj"):
        places = _scaled(share(_inner_size(config, name), segment.number), 1)
    else:
        return (slice(None),)
    return (slice(None), places) if is_summed(module) else (places,)


def is_summed(module: str) -> bool:
    """Says whether the segments' products with this module's weight are parts of one sum."""
    return module.endswith(("o_proj", "down_proj"))


def _segment(config: ModelConfig, index: int) -> Segment:
    """Cuts between groups of heads that share keys; a model with few groups has each of them cut evenly."""
    groups, size = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if groups >= NUM_SEGMENTS:
        own = share(groups, index)
        return Segment(index, range(own.start * size, own.stop * size), own)
    group = next(group for group in range(groups) if index < NUM_SEGMENTS * (group + 1) // groups)
    first, end = NUM_SEGMENTS * group // groups, NUM_SEGMENTS * (group + 1) // groups
    begin, stop = (group * size + size * (at - first) // (end - first) for at in (index, index + 1))
    return Segment(index, range(begin, stop), range(group, group + 1))


def _has_heads(config: ModelConfig, num_ranks: int) -> bool:
    ranks = (segments_of(config, rank, num_ranks) for rank in range(num_ranks))
    return all(any(segment.heads for segment in own) for own in ranks)


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yields what is cut evenly, with its name in config.json."""
    yield "vocab_size", config.vocab_size
    for layer in range(config.num_layers):
        experts = config.experts_of(layer)
        if experts is None:
            yield "intermediate_size", config.intermediate_size
            continue
        yield "moe_intermediate_size", experts.size
        if experts.shared_size:
            yield "shared_expert_intermediate_size", experts.shared_size


def _inner_size(config: ModelConfig, name: str) -> int:
    """Returns the intermediate size of the mlp that a weight belongs to."""
    experts = config.experts_of(int(name.split(".")[2]))  # model.layers.N.
    if experts is None:
        return config.intermediate_size
    return experts.shared_size if ".shared_expert." in name else experts.size


def _scaled(places: range, size: int) -> slice:
    return slice(places.start * size, places.stop * size)
