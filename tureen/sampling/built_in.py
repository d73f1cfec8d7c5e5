"""Logit processors that every server has, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tureen.errors import InvalidRequest, echo
from tureen.logit_processor import CustomLogitProcessor

if TYPE_CHECKING:
    from torch import Tensor

FORBIDDEN = -float("inf")


class DisallowedTokens(CustomLogitProcessor):
    """Forbids the tokens in `custom_params.token_ids`."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        for row, params in enumerate(custom_param_list):
            token_ids = params.get("token_ids")
            vocab_size = logits.shape[1]
            if not isinstance(token_ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in token_ids):
                raise InvalidRequest(
                    f"custom_params.token_ids must be a list of token ids in [0, {vocab_size}), got {echo(token_ids)}",
                    field="custom_params",
                )
            logits[row, token_ids] = FORBIDDEN
        return logits


class NoRepeatNgram(CustomLogitProcessor):
    """Lets no run of `custom_params.ngram_size` tokens come twice in the output (transformers'
    no_repeat_ngram_size)."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        for row, params in enumerate(custom_param_list):
            size = params.get("ngram_size")
            if type(size) is not int or size < 1:
                raise InvalidRequest(
                    f"custom_params.ngram_size must be an integer of at least 1, got {echo(size)}",
                    field="custom_params",
                )
            output_ids = params["__req__"].output_ids
            head = output_ids[len(output_ids) - size + 1 :]
            ends = range(size - 1, len(output_ids))
            repeated = [output_ids[end] for end in ends if output_ids[end - size + 1 : end] == head]
            if len(head) == size - 1 and repeated:
                logits[row, repeated] = FORBIDDEN
        return logits
