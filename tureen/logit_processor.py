"""Custom logit processors: the class that clients and operators derive theirs from, and those that are built in.

Imports: nothing; dill.
Imported by: fields, sampling, serving.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SGLANG_MODULE = "sglang.srt.sampling.custom_logit_processor"
SGLANG_NAMES = (
    "DisallowedTokensLogitsProcessor",
    "Glm4MoeThinkingBudgetLogitProcessor",
    "Qwen3ThinkingBudgetLogitProcessor",
    "DeepSeekR1ThinkingBudgetLogitProcessor",
    "InklingThinkingBudgetLogitProcessor",
    "DeepseekOCRNoRepeatNGramLogitProcessor",
)
"""The processors that SGLang ships in its module, as this server has them under the same names."""

PYTHON = "{}.{}".format(*sys.version_info)
"""The version whose bytecode a class that is sent is made of: client and server must have the same."""

BUILT_IN = {
    "disallowed_tokens": "tureen.sampling.built_in:DisallowedTokens",
    "no_repeat_ngram": "tureen.sampling.built_in:NoRepeatNgram",
    **{name: f"tureen.sampling.sglang_processors:{name}" for name in SGLANG_NAMES},
}
"""Name -> module:Class of the processors that every server has."""


class CustomLogitProcessor:
    """Changes the logits of some sequences before a token is drawn."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        """Returns the changed logits; its arguments and its result are as in SGLang.

        logits: float32 tensor [rows, vocabulary], which may be changed in place; the result has the same shape.

        custom_param_list[i] is the `custom_params` of row i's request. Its key "__req__" is an object with
        `origin_input_ids`, the prompt, and `output_ids`, the tokens drawn so far; the same dictionary comes at every
        step of a request.
        """
        raise NotImplementedError

    @classmethod
    def to_str(cls) -> str:
        """Returns the class as a request's `custom_logit_processor`. Needs dill, which is installed with tureen."""
        import dill  # noqa: PLC0415 - only who sends code needs it

        return json.dumps({"callable": dill.dumps(cls, recurse=True).hex(), "python": PYTHON})
