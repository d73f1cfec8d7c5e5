"""Logit processors that every server has, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tureen.logit_processor import CustomLogitProcessor

FORBIDDEN = -float("inf")


class DisallowedTokens(CustomLogitProcessor):
    """`custom_params.token_ids` are never drawn."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        for row, params in enumerate(custom_param_list):
            logits[row, params["token_ids"]] = FORBIDDEN
        return logits


class NoRepeatNgram(CustomLogitProcessor):
    """No `custom_params.ngram_size` tokens in a row come twice in the output."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        for row, params in enumerate(custom_param_list):
            size = params["ngram_size"]
            output_ids = params["__req__"].output_ids
            head = output_ids[len(output_ids) - size + 1 :]
            ends = range(size - 1, len(output_ids))
            repeated = [output_ids[end] for end in ends if output_ids[end - size + 1 : end] == head]
            if len(head) == size - 1 and repeated:
                logits[row, repeated] = FORBIDDEN
        return logits
