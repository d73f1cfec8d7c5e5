"""Computes how long the prompt and the output of a request took, and how much of a long prompt is computed, in the
forms of llama.cpp's server.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

from tureen.requests.generation import Output


def timings(output: Output) -> dict[str, float]:
    """Returns the times of an output so far, in milliseconds, and its tokens per second.

    The time of the prompt ends with the first output token. Cached tokens are not among those of the prompt.
    """
    prompt_s = output.elapsed_s if output.remarks.first is None else output.remarks.first[0]
    computed = output.usage.prompt_tokens - output.usage.cached_tokens
    return {
        "cache_n": output.usage.cached_tokens,
        **_rates("prompt", computed, prompt_s),
        **_rates("predicted", len(output.token_ids), output.elapsed_s - prompt_s),
    }


class PromptProgress:
    """Reports how much of an output's prompt is computed, each state once, if the request asks for it."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._num_reported = 0  # tokens

    def new(self) -> dict[str, dict[str, int]]:
        """Returns the field of an event, if more of the prompt is computed than the last one said."""
        output, usage = self._output, self._output.usage
        total = usage.prompt_tokens
        is_drawn = usage.output_tokens > usage.forced_tokens
        has_no_output = output.finish is not None and output.finish.type != "abort" and not output.token_ids
        num_computed = total if is_drawn or has_no_output else usage.computed_tokens
        if not output.request.reports_progress or num_computed <= self._num_reported:
            return {}
        self._num_reported = num_computed
        times = {"processed": num_computed, "time_ms": round(output.elapsed_s * 1000)}
        return {"prompt_progress": {"total": total, "cache": output.usage.cached_tokens, **times}}


def _rates(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
