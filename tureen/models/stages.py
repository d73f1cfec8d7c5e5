"""Shares the layers of a decoder out among the stages of a pipeline: each has some, one after another. No torch."""

from __future__ import annotations

import math

from tureen.models.config import ModelConfig


def layers_of(config: ModelConfig, stage: int, num_stages: int) -> range:
    """Returns the layers of a stage, at least one. The first has less where the vocabulary's weights, which it has too,
    make up for them."""
    sizes = {name: math.prod(shape) for name, shape in config.weights().items()}
    in_layers = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    vocabulary = round((sum(sizes.values()) - in_layers) * config.num_layers / in_layers)  # as many layers are as large
    first = max(1, (config.num_layers + vocabulary) // num_stages - vocabulary)
    if stage == 0:
        return range(first)
    rest, later = config.num_layers - first, num_stages - 1
    return range(first + rest * (stage - 1) // later, first + rest * stage // later)


def why_not(config: ModelConfig, num_stages: int) -> str:
    """Returns why `num_stages` stages cannot compute a model; "" if they can."""
    if config.state_floats or config.parts:
        return "stages do not share out the model's recurrent layers, or layers with one part; leave it out"
    if config.keys or config.layer_inputs is not None:
        return "the model's layers differ in their heads, which stages do not share out; leave it out"
    if num_stages <= config.num_layers:
        return ""
    return f"the model has {config.num_layers} layers, and each rank computes at least one; use fewer ranks"
