"""Measures how well a model predicts a text, under different settings: what kernels and fewer bits cost in accuracy.

    python -m tureen.bench.perplexity TEXT kernels=torch,dtype=float32 kernels=native kernels=native,quantization=int8

The other settings are compared with the first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tureen
from tureen.bench.report import lay_out
from tureen.build import find_model
from tureen.config import DEFAULT_MODEL, Config
from tureen.files import read_text

CHUNK = 512  # tokens that see each other
MAX_TEXT_BYTES = 1 << 30


class ScoringEngine(Protocol):
    """The part of `tureen.Engine` that scores."""

    def generate(self, **fields: Any) -> Any: ...


def token_logprobs(engine: ScoringEngine, token_ids: Sequence[int], *, chunk: int = CHUNK) -> list[float]:
    """Returns each token's log-probability, in nats, after those before it in its `chunk`; the first of a chunk has
    none."""
    prompts = [list(token_ids[start : start + chunk]) for start in range(0, len(token_ids) - 1, chunk)]
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [entry[0] for answer in answers for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def perplexity(logprobs: Sequence[float]) -> float:
    """Returns exp(−mean): as many tokens as the model hesitates between. `logprobs` must not be empty."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("settings", nargs="+", metavar="NAME=VALUE[,…]", help="of tureen.Engine")
    parser.add_argument("--model-path", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, help="how many of the first tokens [all]")
    options = parser.parse_args()
    tokenizer = find_model(Config(model_path=options.model_path)).tokenizer
    token_ids = tokenizer.encode(read_text(options.text, max_bytes=MAX_TEXT_BYTES))[: options.tokens]
    lines = [("settings", "tokens", "perplexity", "over the first", "logprobs differ by")]
    first: list[float] = []
    for text in options.settings:
        settings = dict(pair.split("=", 1) for pair in text.split(","))
        with tureen.Engine(model_path=options.model_path, **settings) as engine:
            logprobs = token_logprobs(engine, token_ids)
        first = first or logprobs
        differences = math.fsum(abs(a - b) for a, b in zip(logprobs, first, strict=True)) / len(logprobs)
        ratio = perplexity(logprobs) / perplexity(first)
        lines.append((text, str(len(logprobs)), f"{perplexity(logprobs):.4f}", f"{ratio:.5f}", f"{differences:.5f}"))
    print(lay_out(lines))  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
