"""Finds the purpose of a model on disk: it writes text, makes embeddings, or scores texts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tureen.contract.types import Judge, ModelKind
from tureen.errors import StartupError, echo
from tureen.registry import declaring
from tureen.runner.loading import CLASSIFIER, architecture_of
from tureen.weights.source import HEADLESS, ModelSource, model_config

ENCODERS = "ENCODER_ARCHITECTURES"
"""The name under which a file of tureen/models lists architectures in which each token sees those after it, too."""
JUDGE_TEXT = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
"""A sentence in the prompt of Qwen3-Reranker (arXiv:2506.05176)."""
JUDGE_BEFORE = (
    f'<|im_start|>system\n{JUDGE_TEXT} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGE_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def is_encoder(hf: Mapping[str, Any]) -> bool:
    """Returns True if the model is an encoder, whose texts are computed whole, without a KV cache."""
    return declaring("tureen.models", ENCODERS, architecture_of(hf)) is not None


def model_kind(source: ModelSource) -> ModelKind:
    """Returns the purpose of a model. Raises StartupError for a decoder that its files say is used as an encoder."""
    hf = model_config(source)
    architecture = architecture_of(hf)
    if architecture.endswith(CLASSIFIER):
        return "classifier"
    if is_encoder(hf):
        return "embedder"
    pooling = source.sentence.pooling
    if pooling is None and not architecture.endswith(HEADLESS):
        return "generator"
    if hf.get("is_causal") is False:
        raise StartupError("config.json: is_causal: false is not supported for a decoder", field="is_causal")
    if pooling == "cls":
        raise StartupError(
            "the model pools its first token, which attends to no other token in a decoder", field="model_path"
        )
    return "embedder"


def judge_of(source: ModelSource, template: str | None, token_id: Callable[[str], int | None]) -> Judge | None:
    """Returns how a generator judges documents if it is Qwen3-Reranker, by its name, its chat template or its files.

    token_id: returns the id of a token by its text. Raises StartupError for a reranker with another prompt.
    """
    hf, answers = model_config(source), source.sentence.answers
    is_qwen3 = architecture_of(hf).startswith("Qwen3For")
    is_named = "reranker" in source.name.lower() or JUDGE_TEXT in (template or "")
    if not (is_qwen3 and is_named):
        if answers is not None:
            raise StartupError(
                f"model {source.path / 'modules.json'}: LogitScore is supported only for Qwen3-Reranker; this is "
                f"{echo(source.name)}"
            )
        return None
    yes, no = answers or (token_id("yes"), token_id("no"))
    if yes is None or no is None:
        return None
    return Judge(yes, no, JUDGE_BEFORE, JUDGE_AFTER)
