"""Reads which log-probabilities a body of SGLang's `/generate` asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tureen.contract.types import NO_TOKEN, LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.fields.known_options import is_off
from tureen.fields.shared import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from tureen.requests.generation import Output
from tureen.requests.planning import Sampling, per_prompt

MAX_SUPPORT = 4096
"""Most tokens of one place in a sampling mask."""

LOGPROB_FIELDS: dict[str, Any] = {
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "return_text_in_logprobs": False,
    "logprobs_mode": "processed",
}
"""The fields that need return_logprob, each with the default that changes nothing without it."""


def logprob_specs(
    fields: Mapping[str, Any], prompts: Sequence[Sequence[int]], vocab_size: int
) -> list[LogprobSpec | None]:
    """Returns the log-probabilities to compute of each prompt, None = none. Raises InvalidRequest.

    `fields`: the values of return_logprob and of LOGPROB_FIELDS.
    """
    batch = len(prompts)
    with_logprobs: list[bool] = per_prompt(fields["return_logprob"], batch, "return_logprob")
    starts = _starts(fields["logprob_start_len"], prompts)
    tops = _tops(fields["top_logprobs_num"], batch, vocab_size)
    ids = _ids(fields["token_ids_logprob"], batch, vocab_size)
    _check_asked(fields, with_logprobs)
    return [
        LogprobSpec(starts[index], tops[index], ids[index], fields["logprobs_mode"]) if is_asked else None
        for index, is_asked in enumerate(with_logprobs)
    ]


def with_draws(
    specs: Sequence[LogprobSpec | None], samplings: Sequence[Sampling], starts: Sequence[int], masks: Sequence[bool]
) -> list[LogprobSpec | None]:
    """Returns the log-probabilities of each prompt with what return_entropy and return_sampling_mask ask for. `starts`:
    the positions from which entropies are asked for, see LogprobSpec.

    Raises InvalidRequest for a sampling mask that could be the whole vocabulary.
    """
    for sampling, is_asked in zip(samplings, masks, strict=True):
        params = sampling.params
        if is_asked and not params.is_greedy and not 1 <= params.top_k <= MAX_SUPPORT:
            field = sampling.names.path("top_k")
            raise InvalidRequest(
                f"return_sampling_mask needs {field} of 1 to {MAX_SUPPORT}, which limits the tokens that could be "
                f"sampled, got {params.top_k}",
                field="return_sampling_mask",
            )
    return [
        msgspec.structs.replace(spec or LogprobSpec(), entropy_start=start, support=is_asked)
        if start >= 0 or is_asked
        else spec
        for spec, start, is_asked in zip(specs, starts, masks, strict=True)
    ]


def draw_facts(output: Output, spec: LogprobSpec, first_token: int) -> dict[str, Any]:
    """Returns the facts of meta_info about the draws, from output token `first_token` on. The mask of a forced or
    greedy token has only that token."""
    drawn, facts = output.output_logprobs[first_token:], dict[str, Any]()
    if spec.entropy_start >= 0:
        facts["output_token_entropy"] = [position.entropy for position in drawn]
    if spec.support:
        masks = [[position.token[1]] if position.support is None else position.support for position in drawn]
        facts["output_token_sampling_mask"] = masks
        facts["output_token_sampling_logprobs"] = [position.share or 0.0 for position in drawn]
        facts["output_token_sampling_mask_length"] = len(masks)
    return facts


def _check_asked(fields: Mapping[str, Any], with_logprobs: Sequence[bool]) -> None:
    """Raises InvalidRequest for a field that has no effect, as no prompt that it is for asks for log-probabilities.

    A value that is for all prompts has an effect where any of them asks.
    """
    for name, default in LOGPROB_FIELDS.items():
        for value, is_asked in _values(name, fields[name], with_logprobs):
            if not is_asked and value not in (default, None, []) and not is_off(name, value):
                raise InvalidRequest(f"{name} needs return_logprob: true", field=name)


def _values(name: str, value: Any, with_logprobs: Sequence[bool]) -> Iterable[tuple[Any, bool]]:
    """Returns the values of a field, each with whether log-probabilities are asked for where it acts."""
    if isinstance(value, list) and not (name == "token_ids_logprob" and value and isinstance(value[0], int)):
        return zip(value, with_logprobs, strict=False)
    return [(value, any(with_logprobs))]


def _starts(logprob_start_len: int | list[int], prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns logprob_start_len of each prompt. Raises InvalidRequest for a position outside of the prompt."""
    starts = per_prompt(logprob_start_len, len(prompts), "logprob_start_len")
    for start, token_ids in zip(starts, prompts, strict=True):
        if not -1 <= start <= len(token_ids):
            raise InvalidRequest(
                f"logprob_start_len must be -1 or a position in the prompt of {len(token_ids)} tokens, got "
                f"{echo(start)}",
                field="logprob_start_len",
            )
        if 0 <= start < len(token_ids) and min(token_ids[start:]) <= NO_TOKEN:
            raise InvalidRequest(
                "logprob_start_len needs text or token ids from there on: input_embeds and pictures have no "
                "log-probabilities; leave it out",
                field="logprob_start_len",
            )
    return starts


def _tops(top_logprobs_num: int | list[int], batch: int, vocab_size: int) -> list[int]:
    """Returns top_logprobs_num of each prompt. Raises InvalidRequest."""
    tops = per_prompt(top_logprobs_num, batch, "top_logprobs_num")
    for top in tops:
        if not 0 <= top <= min(MAX_TOP_LOGPROBS, vocab_size):
            raise InvalidRequest(
                f"top_logprobs_num must be 0 to {MAX_TOP_LOGPROBS}, got {echo(top)}", field="top_logprobs_num"
            )
    return tops


def _ids(token_ids_logprob: list[int | list[int] | None] | None, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Returns token_ids_logprob of each prompt. Raises InvalidRequest."""
    lists: list[list[Any]]
    if not token_ids_logprob:
        return [()] * batch
    kinds = set(map(type, token_ids_logprob))
    if kinds == {int}:
        lists = [token_ids_logprob]
    elif int in kinds:
        raise InvalidRequest("token_ids_logprob mixes token ids and lists of them; send one", field="token_ids_logprob")
    else:
        nested: list[Any] = per_prompt(list(token_ids_logprob), batch, "token_ids_logprob")
        lists = [ids or [] for ids in nested]
    for ids in lists:
        if len(ids) > MAX_LOGPROB_IDS:
            raise InvalidRequest(
                f"token_ids_logprob takes at most {MAX_LOGPROB_IDS} ids, got {len(ids)}", field="token_ids_logprob"
            )
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"token_ids_logprob contains out-of-vocabulary token id {echo(token_id)}; valid range is "
                    f"[0, {vocab_size})",
                    field="token_ids_logprob",
                    code="token_id_out_of_range",
                )
    ids_of_prompts = [tuple(ids) for ids in lists]
    return ids_of_prompts if len(ids_of_prompts) == batch else ids_of_prompts * batch
