"""The logit processors that SGLang ships, by its names. They run no code of clients.

Source: what SGLang's documentation says of them, and their token ids, python/sglang/srt/sampling/
custom_logit_processor.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tureen.errors import InvalidRequest, echo
from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling.built_in import FORBIDDEN, DisallowedTokens

if TYPE_CHECKING:
    from torch import Tensor


class DisallowedTokensLogitsProcessor(DisallowedTokens):
    """Forbids the tokens in `custom_params.token_ids`."""


class ThinkingBudgetLogitProcessor(CustomLogitProcessor):
    """Ends the thoughts of a reasoning model after `custom_params.thinking_budget` tokens: a new line, then the token
    that ends them. Without a budget, or with a negative one, it changes nothing.

    A class derived from it names the model's tokens.
    """

    THINKING_START_TOKEN_ID: ClassVar[int]
    THINKING_END_TOKEN_ID: ClassVar[int]
    NEW_LINE_TOKEN_ID: ClassVar[int]

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        for row, params in enumerate(custom_param_list):
            budget = params.get("thinking_budget")
            if budget is None:
                continue
            if type(budget) is not int:
                raise _wrong("thinking_budget", "an integer", budget)
            request = params["__req__"]
            ids = [*request.origin_input_ids, *request.output_ids]
            if 0 <= budget <= self._num_thought(ids):
                is_on_a_new_line = request.output_ids[-1:] == [self.NEW_LINE_TOKEN_ID]
                self._force(logits, row, self.THINKING_END_TOKEN_ID if is_on_a_new_line else self.NEW_LINE_TOKEN_ID)
        return logits

    def _num_thought(self, ids: list[int]) -> int:
        """Returns how many tokens stand behind the start of thoughts that have no end; -1 = there is none."""
        for count, token_id in enumerate(reversed(ids)):
            if token_id == self.THINKING_START_TOKEN_ID:
                return count
            if token_id == self.THINKING_END_TOKEN_ID:
                return -1
        return -1

    def _force(self, logits: Tensor, row: int, token_id: int) -> None:
        if token_id >= logits.shape[1]:
            raise InvalidRequest(
                f"custom_logit_processor: this model has no token {token_id}; {type(self).__name__} needs another",
                field="custom_logit_processor",
            )
        logits[row] = FORBIDDEN
        logits[row, token_id] = 0.0


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of GLM-4.5 and GLM-4.6."""

    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 151350, 151351, 198


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of Qwen3."""

    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 151667, 151668, 198


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of DeepSeek-R1."""

    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 128798, 128799, 201


class InklingThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of Inkling."""

    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 200008, 200010, 198


class DeepseekOCRNoRepeatNGramLogitProcessor(CustomLogitProcessor):
    """Lets no run of `ngram_size` tokens that begins among the last `window_size` tokens of prompt and output come
    again; the tokens in `whitelist_token_ids` may always come."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        for row, params in enumerate(custom_param_list):
            size, window = _positive(params, "ngram_size"), _positive(params, "window_size")
            allowed = params.get("whitelist_token_ids") or []
            if not isinstance(allowed, list) or not all(type(token_id) is int for token_id in allowed):
                raise _wrong("whitelist_token_ids", "a list of token ids", allowed)
            request = params["__req__"]
            ids = [*request.origin_input_ids, *request.output_ids]
            head = ids[len(ids) - size + 1 :]
            starts = range(max(0, len(ids) - window), len(ids) - size + 1)
            repeated = {ids[start + size - 1] for start in starts if ids[start : start + size - 1] == head}
            of_text = [token_id for token_id in repeated.difference(allowed) if token_id >= 0]  # pictures are negative
            logits[row, of_text] = FORBIDDEN
        return logits


def _positive(params: dict[str, Any], name: str) -> int:
    """Returns a parameter that must be a positive integer. Raises InvalidRequest."""
    value = params.get(name)
    if type(value) is not int or value < 1:
        raise _wrong(name, "an integer of at least 1", value)
    return value


def _wrong(name: str, allowed: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"custom_params.{name} must be {allowed}, got {echo(value)}", field="custom_params")
