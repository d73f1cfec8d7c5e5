"""Reads which log-probabilities a body of SGLang's `/generate` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tureen.contract.types import NO_TOKEN, LogprobsMode, LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.requests.planning import per_prompt
from tureen.requests.prompts import check_batch
from tureen.requests.shared_fields import MAX_LOGPROB_IDS, MAX_PROMPTS, MAX_TOP_LOGPROBS

LOGPROB_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "logprobs_mode")


def logprob_specs(
    fields: Mapping[str, Any], prompts: Sequence[Sequence[int]], vocab_size: int
) -> list[LogprobSpec | None]:
    """Returns the log-probabilities to compute of each prompt, None = none. Raises InvalidRequest.

    `fields`: the values of LOGPROB_FIELDS.
    """
    batch = len(prompts)
    with_logprobs: list[bool] = per_prompt(fields["return_logprob"], batch, "return_logprob")
    starts = _starts(fields["logprob_start_len"], prompts)
    tops = _tops(fields["top_logprobs_num"], batch, vocab_size)
    ids = _ids(fields["token_ids_logprob"], batch, vocab_size)
    return [
        _spec(with_logprobs[index], starts[index], tops[index], ids[index], fields["logprobs_mode"])
        for index in range(batch)
    ]


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
                "logprob_start_len needs text or token ids from there on: there are no tokens in input_embeds and in "
                "pictures to take log-probabilities of; leave it out",
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
        check_batch(len(token_ids_logprob), MAX_PROMPTS, "token_ids_logprob")
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


def _spec(is_asked: bool, start: int, top: int, token_ids: tuple[int, ...], mode: LogprobsMode) -> LogprobSpec | None:
    """Returns the log-probabilities to compute, None = none. Raises InvalidRequest for fields that would have no
    effect; values that clients send as defaults are allowed."""
    if is_asked:
        return LogprobSpec(start, top, token_ids, mode)
    fields = {
        "top_logprobs_num": top > 0,
        "token_ids_logprob": bool(token_ids),
        "logprob_start_len": start > 0,
        "logprobs_mode": mode != "processed",
    }
    for name, is_set in fields.items():
        if is_set:
            raise InvalidRequest(f"{name} needs return_logprob: true", field=name)
    return None
