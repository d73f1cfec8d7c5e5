"""Log-probabilities of the tokens a request asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tureen.contract.types import LEAST_LOGPROB, LogprobSpec, PositionLogprobs, TokenLogprob
from tureen.sampling.arithmetic import Arithmetic, Ids, Softmaxes


def report(
    arithmetic: Arithmetic, softmaxes: Softmaxes, token_ids: Sequence[int], specs: Sequence[LogprobSpec]
) -> list[PositionLogprobs]:
    """Returns for each row the log softmax at its token and at what its spec asks for, in nats.

    token_ids: the token drawn in each row. A value that is not finite (that of a forbidden token) becomes
    LEAST_LOGPROB.
    """
    columns = [np.array(token_ids, dtype=np.int64)[:, None]]
    most = max(spec.top for spec in specs)
    if most:
        columns.append(arithmetic.best(softmaxes.logits, softmaxes.rows, most))
    if any(spec.token_ids for spec in specs):
        columns.append(_padded([spec.token_ids for spec in specs]))
    ids = np.concatenate(columns, axis=1)
    num_top = columns[1].shape[1] if most else 0  # the vocabulary may have fewer than were asked for
    values = arithmetic.log_softmax(softmaxes, ids)
    entropies = _entropies(arithmetic, softmaxes, specs)
    return [
        _position(row_values, row_ids, num_top, spec, entropy)
        for row_values, row_ids, spec, entropy in zip(values.tolist(), ids.tolist(), specs, entropies, strict=True)
    ]


def _entropies(arithmetic: Arithmetic, softmaxes: Softmaxes, specs: Sequence[LogprobSpec]) -> list[float | None]:
    """Returns the entropy of each row's distribution in nats, of the rows whose spec asks for it."""
    entropies: list[float | None] = [None] * len(specs)
    asking = [place for place, spec in enumerate(specs) if spec.entropy_start >= 0]
    everything = np.arange(softmaxes.logits.shape[1] if asking else 0, dtype=np.int64)[None]
    for place in asking:  # row by row: the whole vocabulary is on the host
        values = arithmetic.log_softmax(softmaxes.of([place]), everything)[0]
        values = values[np.isfinite(values)]
        entropies[place] = max(0.0, -float(np.dot(np.exp(values), values)))
    return entropies


def _position(
    values: list[float], ids: list[int], num_top: int, spec: LogprobSpec, entropy: float | None
) -> PositionLogprobs:
    entries = [_entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]
    asked = entries[1 + num_top :]
    return PositionLogprobs(
        token=entries[0],
        top=tuple(entries[1 : 1 + min(spec.top, num_top)]) if spec.top else None,
        token_ids=tuple(asked[: len(spec.token_ids)]) if spec.token_ids else None,
        entropy=entropy,
    )


def _entry(value: float, token_id: int) -> TokenLogprob:
    return (value if math.isfinite(value) else LEAST_LOGPROB), token_id


def _padded(lists: Sequence[Sequence[int]]) -> Ids:
    width = max(map(len, lists))
    return np.array([[*ids, *[0] * (width - len(ids))] for ids in lists], dtype=np.int64)
