"""Log-probabilities of the tokens a request asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tureen.sampling.probability import best_keys, key_tokens, rank_keys, softmax_weights
from tureen.types import LogprobSpec, PositionLogprobs, TokenLogprob


def report(
    logits: Tensor, token_ids: Sequence[int], temperatures: Sequence[float], specs: Sequence[LogprobSpec]
) -> list[PositionLogprobs]:
    """log softmax(logits / temperature) of logits [r, vocab] float32, for each row what its spec asks.

    Sums and logarithms are float64. A value that is not finite (a forbidden token) is None.
    """
    num_top = min(max(spec.top for spec in specs), logits.shape[1])
    columns = [torch.tensor(token_ids, device=logits.device)[:, None]]
    if num_top:
        columns.append(key_tokens(best_keys(rank_keys(logits), num_top), logits.shape[1]))
    if any(spec.token_ids for spec in specs):
        columns.append(_padded([spec.token_ids for spec in specs], logits.device))
    ids = torch.cat(columns, dim=1)
    values = _log_softmax_at(logits, ids, torch.tensor(temperatures, dtype=torch.float64, device=logits.device))
    return [
        _position(row_values, row_ids, num_top, spec)
        for row_values, row_ids, spec in zip(values.tolist(), ids.tolist(), specs, strict=True)
    ]


def _log_softmax_at(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    """[r, k] float64 for ids [r, k] and temperatures [r]"""
    peaks = logits.amax(dim=1)
    totals = softmax_weights(logits, peaks, temperatures).totals
    above = logits.gather(1, ids).double().sub_(peaks.double()[:, None]).div_(temperatures[:, None])
    return above - totals.log()[:, None]


def _position(values: list[float], ids: list[int], num_top: int, spec: LogprobSpec) -> PositionLogprobs:
    entries = [_entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]
    asked = entries[1 + num_top :]
    return PositionLogprobs(
        token=entries[0],
        top=tuple(entries[1 : 1 + min(spec.top, num_top)]) if spec.top else None,
        token_ids=tuple(asked[: len(spec.token_ids)]) if spec.token_ids else None,
    )


def _entry(value: float, token_id: int) -> TokenLogprob:
    return (value if math.isfinite(value) else None), token_id


def _padded(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(map(len, lists))
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in lists], dtype=torch.int64, device=device)
