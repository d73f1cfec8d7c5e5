"""A processor that an operator registers: what it does depends on how often it was called, not on the tokens alone."""

from __future__ import annotations

from tureen.logit_processor import CustomLogitProcessor


class Counting(CustomLogitProcessor):
    """Every third token is not the likeliest."""

    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            params["calls"] = params.get("calls", 0) + 1
            if params["calls"] % 3 == 0:
                logits[row, logits[row].argmax()] = -float("inf")
        return logits
