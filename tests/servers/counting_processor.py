"""Processors that an operator registers."""

from __future__ import annotations

import os

from tureen.logit_processor import CustomLogitProcessor


class Counting(CustomLogitProcessor):
    """Every third token is not the likeliest: what it does depends on how often it was called, not on the tokens."""

    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            params["calls"] = params.get("calls", 0) + 1
            if params["calls"] % 3 == 0:
                logits[row, logits[row].argmax()] = -float("inf")
        return logits


class Aborting(CustomLogitProcessor):
    """Ends the engine's process as a fault in native code does, at a row whose parameters say so."""

    def __call__(self, logits, custom_param_list):
        if any(params.get("abort") for params in custom_param_list):
            os.abort()
        return logits
