"""Rows of logits as numpy arrays, on the CPU, computed by the native kernels without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tureen.grammar import Mask
from tureen.kernels.cpu import native
from tureen.sampling.arithmetic import (
    Change,
    Ids,
    NotedDraw,
    Operation,
    Peaks,
    Ranking,
    Saved,
    Softmaxes,
    Spans,
    Sums,
    TracedRow,
    Values,
)

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float32]


class NativeArithmetic:
    """The sampler's `Arithmetic` on arrays in C order. Many rows are shared among the threads of the pool."""

    def __init__(self, pool: Any) -> None:
        """`pool`: the extension module's Pool. Raises RuntimeError where the extension is missing."""
        kernels = native.require()
        self._kernels = kernels
        self._pool = pool
        self._operations = {operation: getattr(kernels.Operation, operation.name) for operation in Operation}

    def prepare(self, logits: Array) -> Array:
        return np.ascontiguousarray(logits, dtype=np.float32)

    def copy(self, logits: Array, rows: Sequence[int]) -> Array:
        return logits[list(rows)]

    def greedy(self, logits: Array, masks: Sequence[Mask | None]) -> list[int]:
        tokens: list[int] = self._kernels.greedy(self._pool, logits, masks)
        return tokens

    def peaks(self, logits: Array) -> Peaks:
        return Peaks(*self._kernels.peaks(self._pool, logits))

    def change(self, logits: Array, operation: Operation, rows: Sequence[int], changes: Sequence[Change]) -> None:
        for row, (token_ids, values) in zip(rows, changes, strict=True):
            self._kernels.change(logits, row, self._operations[operation], token_ids, values)

    def forbid(self, logits: Array, peaks: Peaks, rows: Sequence[int], masks: Sequence[Mask]) -> None:
        index = np.array(rows, dtype=np.int64)
        peaks.values[index], peaks.token_ids[index] = self._kernels.forbid(self._pool, logits, index, masks)

    def draw(self, softmaxes: Softmaxes, uniforms: Values) -> Ids:
        drawn: Ids = self._kernels.draw(self._pool, *softmaxes, uniforms)
        return drawn

    def draw_noting(self, softmaxes: Softmaxes, uniforms: Values) -> NotedDraw:
        return NotedDraw(*self._kernels.draw_noting(self._pool, *softmaxes, uniforms))

    def spans(self, softmaxes: Softmaxes, sums: Sums, token_ids: Ids) -> Spans:
        return Spans(*self._kernels.spans(self._pool, *softmaxes, sums, token_ids))

    def saved(self, logits: Array, rows: Sequence[int], token_ids: Sequence[Ids | None]) -> list[Saved]:
        return [
            (ids, logits[row].copy() if ids is None else logits[row].take(ids))
            for row, ids in zip(rows, token_ids, strict=True)
        ]

    def trace(
        self,
        logits: Array,
        rows: Ids,
        histories: Sequence[Sequence[Saved]],
        token_ids: Ids,
        totals: Values,
        width: int,
    ) -> list[TracedRow]:
        traced = self._kernels.trace(self._pool, logits, rows, histories, token_ids, totals, width)
        return list(starmap(TracedRow, traced))

    def rank(self, softmaxes: Softmaxes, width: int) -> Ranking:
        return Ranking(*self._kernels.rank(self._pool, *softmaxes, width))

    def best(self, logits: Array, rows: Ids, width: int) -> Ids:
        token_ids: Ids = self._kernels.best(self._pool, logits, rows, width)
        return token_ids

    def log_softmax(self, softmaxes: Softmaxes, token_ids: Ids) -> Values:
        totals: Values = self._kernels.totals(self._pool, *softmaxes)
        logs = np.array([math.log(total) for total in totals.tolist()])
        chosen = softmaxes.logits[softmaxes.rows[:, None], token_ids].astype(np.float64)
        with np.errstate(invalid="ignore"):  # -inf less -inf, in a row that has nothing else
            above = (chosen - softmaxes.peaks.astype(np.float64)[:, None]) / softmaxes.temperatures[:, None]
            values: Values = above - logs[:, None]
        return values

    def host_row(self, logits: Array, row: int) -> Array:
        return np.asarray(logits[row])

    def tensor(self, logits: Array, rows: Sequence[int]) -> torch.Tensor:
        import torch  # noqa: PLC0415 - only custom logit processors of the operator want it

        return torch.from_numpy(self.copy(logits, rows))

    def adopt(self, rows: Array | torch.Tensor) -> Array:
        return self.prepare(rows if isinstance(rows, np.ndarray) else rows.numpy())

    def replace(self, logits: Array, row: int, other: Array, other_row: int) -> None:
        logits[row] = other[other_row]
