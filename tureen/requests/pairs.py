"""Scores texts and pairs of texts for any API, with a classifier or with a generative model trained to judge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.contract.params import SamplingParams
from tureen.contract.types import LEAST_LOGPROB, LogprobSpec, ScoreActivation
from tureen.requests import batching, tokenising
from tureen.requests.batching import Requester
from tureen.requests.drafts import Options
from tureen.requests.embedding import NOTHING_DRAWN, limit_of, vector_of
from tureen.requests.generation import Output
from tureen.requests.offload import offload
from tureen.requests.planning import Names, Sampling
from tureen.requests.prompts import Prompt
from tureen.requests.state import Context, ServerState

ONE_TOKEN = Sampling(SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True), {}, Names())
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own instruction for queries without one."""


class Pair(NamedTuple):
    """Two texts that are scored together, or a single text."""

    first: str
    second: str | None = None


class Scored(NamedTuple):
    """The scores of a pair, one for each label, and the request that computed them."""

    scores: NDArray[np.float64]
    output: Output


async def classify(
    pairs: Sequence[Pair],
    names: Sequence[str],
    activation: ScoreActivation,
    requester: Requester,
    state: ServerState,
    *,
    truncate: int | None = None,
    priority: int = 0,
) -> list[Scored]:
    """Computes the scores of texts and pairs by a classifier, in their order. Raises InvalidRequest with a pair's
    name.

    `names`: what errors call each pair; `truncate`: most tokens of a pair, -1 = as many as the model takes.
    """
    limit = None if truncate is None else limit_of(truncate, state.context)
    size = sum(len(pair.first) + len(pair.second or "") for pair in pairs)
    prompts = await offload.run_each(size, lambda pair: prompt_of(pair, limit, state.context), pairs)
    _check(prompts, names, state.context)
    options = Options(hidden_states="last" if _is_decoder(state) else "pooled", priority=priority)
    draft = batching.draft_of(prompts, names, NOTHING_DRAWN, options, requester)
    outputs = await batching.run_all(draft, requester, state)
    return [Scored(activated(vector_of(output), activation), output) for output in outputs]


async def judge(
    pairs: Sequence[Pair],
    names: Sequence[str],
    instruct: str | None,
    requester: Requester,
    state: ServerState,
    *,
    truncate: int | None = None,
    priority: int = 0,
) -> list[Scored]:
    """Computes the probability that the model answers yes, not no, to each pair of a query and a document.

    `names` and `truncate`: as in `classify`; the prompt around the pair is never cut. Raises InvalidRequest.
    """
    how = state.context.info.judge
    assert how is not None
    limit = None if truncate is None else limit_of(truncate, state.context)
    tokenizer = state.context.tokenizer
    around = [tokenizer.encode(text, add_special_tokens=False) for text in (how.before, how.after)]
    texts = [question(pair, instruct) for pair in pairs]
    room = None if limit is None else max(0, min(limit, state.context.capacity - 1) - sum(map(len, around)))
    if room is not None:
        read = partial(tokenising.beginning, most=room, tokenizer=tokenizer)
        texts = await offload.run_each(sum(map(len, texts)), read, texts)
    contents = await tokenising.encode(texts, tokenizer, add_special_tokens=False)
    prompts = [Prompt([*around[0], *content[:room], *around[1]]) for content in contents]
    _check(prompts, names, state.context)
    options = Options(logprobs=LogprobSpec(token_ids=(how.yes, how.no), mode="raw"), priority=priority)
    outputs = await batching.run_all(batching.draft_of(prompts, names, ONE_TOKEN, options, requester), requester, state)
    return [Scored(np.array([yes_share(output)]), output) for output in outputs]


def question(pair: Pair, instruct: str | None) -> str:
    """Returns the part of Qwen3-Reranker's prompt with the pair (arXiv:2506.05176)."""
    return f"<Instruct>: {instruct or INSTRUCTION}\n<Query>: {pair.first}\n<Document>: {pair.second}"


def yes_share(output: Output) -> float:
    """Returns the probability of yes among yes and no."""
    yes, no = (LEAST_LOGPROB if value is None else value for value, _ in output.output_logprobs[0].token_ids or ())
    return float(activated(np.array([yes - no]), "sigmoid")[0]) if yes > LEAST_LOGPROB else 0.0


def prompt_of(pair: Pair, limit: int | None, context: Context) -> Prompt:
    """Tokenizes a text or a pair, cut to `limit` tokens if there is one."""
    first, second = pair
    if limit is not None and second is not None:
        first, second = tokenising.pair_beginnings(first, second, limit, context.tokenizer)
    elif limit is not None:
        first = tokenising.beginning(first, limit, context.tokenizer)
    token_ids, second_start = context.tokenizer.encode_pair(first, second, limit)
    return Prompt(token_ids, second_start=second_start)


def activated(logits: NDArray[np.float64], activation: ScoreActivation) -> NDArray[np.float64]:
    """Returns the scores of a classifier's logits."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(0, -logits)))
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _check(prompts: Sequence[Prompt], names: Sequence[str], context: Context) -> None:
    for prompt, name in zip(prompts, names, strict=True):
        tokenising.check_tokens(prompt.token_ids, name, context)


def _is_decoder(state: ServerState) -> bool:
    return state.context.info.kv_bytes_per_token > 0
