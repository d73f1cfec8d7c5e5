"""SGLang's fields about log-probabilities: from what a body says to one LogprobSpec per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.contract.types import NO_TOKEN, LogprobsMode, LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.requests.planning import per_prompt
from tureen.requests.prompts import check_batch
from tureen.requests.shared_fields import MAX_PROMPTS

MAX_TOP_LOGPROBS = 128
MAX_LOGPROB_IDS = 1024


def starts_of(given: int | list[int], prompts: Sequence[Sequence[int]]) -> list[int]:
    """logprob_start_len of each prompt. Raises InvalidRequest for a position outside of it."""
    starts = per_prompt(given, len(prompts), "logprob_start_len")
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


def tops_of(given: int | list[int], batch: int, vocab_size: int) -> list[int]:
    """top_logprobs_num of each prompt. Raises InvalidRequest."""
    tops = per_prompt(given, batch, "top_logprobs_num")
    for top in tops:
        if not 0 <= top <= min(MAX_TOP_LOGPROBS, vocab_size):
            raise InvalidRequest(
                f"top_logprobs_num must be 0 to {MAX_TOP_LOGPROBS}, got {echo(top)}", field="top_logprobs_num"
            )
    return tops


def ids_of(given: list[int | list[int] | None] | None, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    """token_ids_logprob of each prompt. Raises InvalidRequest."""
    lists: list[list[Any]]
    if not given:
        return [()] * batch
    kinds = set(map(type, given))
    if kinds == {int}:
        lists = [given]
    elif int in kinds:
        raise InvalidRequest("token_ids_logprob mixes token ids and lists of them; send one", field="token_ids_logprob")
    else:
        check_batch(len(given), MAX_PROMPTS, "token_ids_logprob")
        nested: list[Any] = per_prompt(list(given), batch, "token_ids_logprob")
        lists = [one or [] for one in nested]
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
    found = [tuple(ids) for ids in lists]
    return found if len(found) == batch else found * batch


def spec_of(wanted: bool, start: int, top: int, token_ids: tuple[int, ...], mode: LogprobsMode) -> LogprobSpec | None:
    """Raises InvalidRequest where a field would do nothing, but for the values that clients send as defaults."""
    if wanted:
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
