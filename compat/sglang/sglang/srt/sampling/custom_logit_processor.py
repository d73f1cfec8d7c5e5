"""The classes that SGLang has in this module. A pickle names them by it, so servers of both kinds can read it."""

from __future__ import annotations

from tureen.logit_processor import CustomLogitProcessor as _Base
from tureen.sampling import sglang_processors as _shipped


class CustomLogitProcessor(_Base):
    """The base class of a client's processors."""


class DisallowedTokensLogitsProcessor(_shipped.DisallowedTokensLogitsProcessor, CustomLogitProcessor):
    """Forbids the tokens in `custom_params["token_ids"]`."""


class ThinkingBudgetLogitProcessor(_shipped.ThinkingBudgetLogitProcessor, CustomLogitProcessor):
    """Ends thoughts after `custom_params["thinking_budget"]` tokens; a derived class names the model's tokens."""


class Glm4MoeThinkingBudgetLogitProcessor(_shipped.Glm4MoeThinkingBudgetLogitProcessor, ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of GLM-4.5 and GLM-4.6."""


class Qwen3ThinkingBudgetLogitProcessor(_shipped.Qwen3ThinkingBudgetLogitProcessor, ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of Qwen3."""


class DeepSeekR1ThinkingBudgetLogitProcessor(
    _shipped.DeepSeekR1ThinkingBudgetLogitProcessor, ThinkingBudgetLogitProcessor
):
    """Bounds the thoughts of DeepSeek-R1."""


class InklingThinkingBudgetLogitProcessor(_shipped.InklingThinkingBudgetLogitProcessor, ThinkingBudgetLogitProcessor):
    """Bounds the thoughts of Inkling."""


class DeepseekOCRNoRepeatNGramLogitProcessor(_shipped.DeepseekOCRNoRepeatNGramLogitProcessor, CustomLogitProcessor):
    """Lets no n-gram of the last tokens come again."""
