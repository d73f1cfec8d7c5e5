"""Computes embeddings of prompts for any API: makes the requests, runs them, reads the vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.contract.params import SamplingParams
from tureen.contract.types import EngineInfo, HiddenStates
from tureen.errors import DeadlineExceeded, InvalidRequest, echo
from tureen.requests import batching, tokenising
from tureen.requests.batching import Requester
from tureen.requests.drafts import Options
from tureen.requests.generation import Output
from tureen.requests.offload import offload
from tureen.requests.planning import Names, Sampling
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.state import Context, ServerState
from tureen.text.tokenizer import Tokenizer

NOTHING_DRAWN = Sampling(SamplingParams(max_new_tokens=0), {}, Names())

PoolingField = Literal["mean", "last", "cls"]


class EmbeddingOptions(NamedTuple):
    """A body's options for computing embeddings."""

    hidden_states: HiddenStates
    truncate: int | None = None  # maximum tokens kept of a text; -1 = the model's maximum
    adapter: str = ""
    priority: int = 0


def states_for(pooling: PoolingField | None, info: EngineInfo) -> HiddenStates:
    """Returns the hidden states to ask the engine for; None = the model's own pooling. Raises InvalidRequest for a
    pooling that the model does not have."""
    own = info.pooling
    if own is None and pooling != "cls":
        return "pooled" if pooling == "mean" else "last"
    if own is not None and pooling in (None, own):
        return "last" if own == "last" else "pooled"
    allowed = "mean or last, as this model reads from left to right" if own is None else f"{own}, or omitted"
    raise InvalidRequest(f"pooling must be {allowed}; got {pooling}", field="pooling")


def prompt_text(name: str | None, info: EngineInfo, field: str = "prompt_name") -> str:
    """Returns the text that the model's makers put before texts, by its name; None = that of the model's default.
    Raises InvalidRequest, with the client's `field`, for a name that the model does not have."""
    chosen = info.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in info.prompts:
        names = ", ".join(sorted(info.prompts))
        allowed = f"one of {names}, or omitted" if names else "omitted: this model has no prompts"
        raise InvalidRequest(f"{field} must be {allowed}; got {echo(chosen)}", field=field)
    return info.prompts[chosen]


def check_dimensions(dimensions: int | None, info: EngineInfo) -> None:
    """Raises InvalidRequest for a size to which this model's embeddings cannot be cut."""
    sizes = {*info.embedding_sizes, info.hidden_size}
    if dimensions is None or dimensions in sizes:
        return
    listed = ", ".join(map(str, sorted(sizes))) if len(sizes) <= 16 else f"1 to {info.hidden_size}"
    reason = "" if info.embedding_sizes else ": this model was not trained for shorter embeddings"
    raise InvalidRequest(f"dimensions must be {listed}{reason}; got {echo(dimensions)}", field="dimensions")


async def embed(
    inputs: Texts | list[Prompt],
    names: Sequence[str],
    chosen: EmbeddingOptions,
    requester: Requester,
    state: ServerState,
) -> list[Output]:
    """Computes the prompts and returns an output for each, in their order. Raises InvalidRequest with the prompt's
    name.

    `names`: what errors call each prompt.
    """
    context = state.context
    if chosen.truncate is not None:
        inputs = await _cut(inputs, limit_of(chosen.truncate, context), context.tokenizer)
    resolved = await tokenising.resolve(inputs, names, state)
    options = Options(hidden_states=chosen.hidden_states, adapter=chosen.adapter, priority=chosen.priority)
    draft = batching.draft_of(resolved, names, NOTHING_DRAWN, options, requester)
    return await batching.run_all(draft, requester, state)


def vector_of(output: Output) -> NDArray[np.float64]:
    """Returns the embedding of a finished output: [hidden_size], not normalised. Raises DeadlineExceeded if the request
    ended before it was computed."""
    if not output.hidden_states:
        raise DeadlineExceeded("the request was ended, by its deadline_ms or an abort, before its prompt was computed")
    return np.frombuffer(output.hidden_states[-1], dtype=np.float32).astype(np.float64)


def normalised(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the vector scaled to Euclidean length 1; a vector of zeros stays as it is."""
    length = float(np.sqrt((vector * vector).sum()))
    return vector / (length or 1.0)


def limit_of(truncate: int, context: Context) -> int:
    """Returns the number of tokens to which `truncate` limits a prompt. Raises InvalidRequest."""
    if truncate == -1:
        return context.capacity
    if not 1 <= truncate <= context.capacity:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1, or 1 to {context.capacity}, got {echo(truncate)}",
            field="truncate_prompt_tokens",
        )
    return truncate


async def _cut(inputs: Texts | list[Prompt], limit: int, tokenizer: Tokenizer) -> list[Prompt]:
    """Returns the prompts, each cut to its first `limit` tokens."""
    if not isinstance(inputs, Texts):
        return [Prompt(prompt.token_ids[:limit]) for prompt in inputs]
    read = partial(tokenising.beginning, most=limit, tokenizer=tokenizer)
    texts = await offload.run_each(sum(map(len, inputs.texts)), read, inputs.texts)
    whole = await tokenising.encode(texts, tokenizer)
    plain = await tokenising.encode(texts, tokenizer, add_special_tokens=False)
    size = sum(map(len, plain))
    return await offload.run_each(size, lambda pair: Prompt(first_tokens(*pair, limit)), zip(whole, plain, strict=True))


def first_tokens(whole: Sequence[int], plain: Sequence[int], limit: int) -> list[int]:
    """Returns `whole` cut to `limit` tokens by dropping the last of the text's own tokens, `plain`; special tokens
    around them, such as BOS or [SEP], stay."""
    num_around = len(whole) - len(plain)
    if len(whole) <= limit:
        return list(whole)
    start = next((at for at in range(num_around + 1) if whole[at : at + len(plain)] == plain), 0)
    kept = plain[: max(0, limit - num_around)]
    return [*whole[:start], *kept, *whole[start + len(plain) :]][:limit]
