"""Reads the experts of a model from the metadata of a GGUF file.

Source: llama.cpp's src/llama-model.cpp.
"""

from __future__ import annotations

from typing import Any, Final

from tureen.errors import echo
from tureen.weights.gguf_facts import GgufFacts

Config = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""
PLAIN_CHOICE: Final[dict[str, object]] = {
    "expert_gating_func": SOFTMAX,
    "expert_weights_norm": True,
    "expert_weights_scale": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "leading_dense_block_count": 0,
    "interleave_moe_layer_step": 1,
}
"""Keys of experts -> the value of a model that has them in each layer, chooses them by softmax, and has no other."""
SHARED: Final = ("expert_shared_count", "expert_shared_feed_forward_length")


def experts(facts: GgufFacts, **allowed: object) -> tuple[int, int]:
    """Returns the number of experts, and of those that a token uses. Raises StartupError for another way to choose.

    allowed: values that differ from PLAIN_CHOICE; None: the caller reads the key.
    """
    for key, plain in (PLAIN_CHOICE | allowed).items():
        value = facts.get(key)
        is_unset = value is None or (value == 0 and not isinstance(value, bool))
        if plain is not None and not is_unset and value != plain:
            raise facts.unsupported(f"{facts.architecture}.{key} {echo(value)} is not supported")
    return facts.count("expert_count"), facts.count("expert_used_count")


def mixtral_experts(facts: GgufFacts, config: Config, **allowed: object) -> Config:
    """Returns the experts of families whose config.json stores their size as intermediate_size."""
    count, used = experts(facts, **allowed)
    size = facts.count("expert_feed_forward_length", config["intermediate_size"])
    return {"num_local_experts": count, "num_experts_per_tok": used, "intermediate_size": size}


def shared(facts: GgufFacts, size: int) -> int:
    """Returns the size of the shared expert, as a number of experts of this size. Raises StartupError."""
    count = facts.optional_count("expert_shared_count") or 0
    length = facts.optional_count("expert_shared_feed_forward_length") or size * count
    if length != size * count:
        raise facts.unsupported(
            f"{facts.architecture}.expert_shared_feed_forward_length must be {size * count}, got {length}"
        )
    return count
