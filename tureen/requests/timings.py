"""Computes how long the prompt and the output of a request took, in the form of llama.cpp's server.

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


def _rates(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
