"""The description of a layer's experts. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class Experts(msgspec.Struct, frozen=True):
    """The experts of a layer's mlp, of which each token uses a few (arXiv:2101.03961, arXiv:2401.04088).

    The router scores all experts; a token uses those with the highest scores and weighs their results by the scores.
    """

    count: int
    num_chosen: int
    size: int  # an expert's intermediate size
    is_normalised: bool  # the weights of the chosen experts are divided by their sum
    shared_size: int = 0  # intermediate size of one more expert that every token uses; 0 = none
    has_shared_gate: bool = True  # the shared expert's result is multiplied by the sigmoid of a gate
    are_beside: bool = False  # the layer adds the results of a single mlp and of the experts (Gemma 4)
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.0  # of sparsemixer (arXiv:2409.12136): half the relative distance of logits that count
    has_bias: bool = False  # of the router
    has_correction: bool = False  # a bias is added to the scores for the choice alone (arXiv:2408.15664)
    factor: float = 1.0  # the weights are multiplied by it
    num_groups: int = 1  # experts are chosen from the best groups alone (arXiv:2405.04434)
    num_chosen_groups: int = 1
    group_top_k: int = 2  # a group's score is the sum of its `group_top_k` largest scores (2: arXiv:2412.19437)
