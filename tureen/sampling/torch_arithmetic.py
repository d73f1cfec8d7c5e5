"""Rows of logits as tensors, on any device that torch has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tureen.grammar import Mask
from tureen.kernels.fused import DrawKernel
from tureen.sampling import grammar_mask
from tureen.sampling.arithmetic import (
    NOT_SOUND,
    NOTHING_ALLOWED,
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
from tureen.sampling.probability import (
    Weights,
    best_keys,
    draw,
    key_tokens,
    peak_tokens,
    rank_keys,
    softmax_weights,
    spans,
)

FLOAT32_MAX = torch.finfo(torch.float32).max


def marked(values: Tensor, tokens: Tensor, sound: Tensor) -> Tensor:
    """Returns tokens [rows] with the marks of rows that have none to draw. values [rows]: their logits, after masks."""
    return torch.where(sound, torch.where(values == -torch.inf, NOTHING_ALLOWED, tokens), NOT_SOUND)


class TorchArithmetic:
    """The sampler's `Arithmetic` in torch: it computes all weights of a row's softmax, in float64."""

    def __init__(self, device: torch.device | str, draw_kernel: DrawKernel | None = None) -> None:
        """draw_kernel: draws the same tokens as the torch operations that it replaces."""
        self._device = torch.device(device)
        self._draw_kernel = draw_kernel

    @torch.inference_mode()
    def prepare(self, logits: Tensor) -> Tensor:
        return logits.float()

    @torch.inference_mode()
    def copy(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        return logits[self._index(rows)]

    @torch.inference_mode()
    def greedy(self, logits: Tensor, masks: Sequence[Mask | None]) -> list[int]:
        values = logits.amax(dim=1)
        sound = values.isfinite()
        present = {row: mask for row, mask in enumerate(masks) if mask is not None}
        if present:
            grammar_mask.apply(logits, list(present), list(present.values()))
            values = logits.amax(dim=1)
        tokens: list[int] = marked(values, peak_tokens(logits, values), sound).tolist()
        return tokens

    @torch.inference_mode()
    def peaks(self, logits: Tensor) -> Peaks:
        values = logits.amax(dim=1)
        return Peaks(*(_on_host(tensor) for tensor in (values, peak_tokens(logits, values))))

    @torch.inference_mode()
    def change(self, logits: Tensor, operation: Operation, rows: Sequence[int], changes: Sequence[Change]) -> None:
        lengths = [len(token_ids) for token_ids, _ in changes]
        row = self._sent(np.repeat(rows, lengths))
        token = self._sent(np.concatenate([token_ids for token_ids, _ in changes]))
        value = self._sent(np.concatenate([values for _, values in changes]))
        logits[row, token] = _changed(operation, logits[row, token].double(), value).float()

    @torch.inference_mode()
    def forbid(self, logits: Tensor, peaks: Peaks, rows: Sequence[int], masks: Sequence[Mask]) -> None:
        grammar_mask.apply(logits, rows, masks)
        index = np.array(rows)
        peaks.values[index], peaks.token_ids[index] = self.peaks(self._taken(logits, index))

    @torch.inference_mode()
    def draw(self, softmaxes: Softmaxes, uniforms: Values) -> Ids:
        if self._draw_kernel is not None:
            sent = [self._sent(each) for each in (softmaxes.peaks, softmaxes.temperatures, uniforms)]
            return _on_host(self._draw_kernel(self._taken(softmaxes.logits, softmaxes.rows).contiguous(), *sent))
        _, weights = self._weights(softmaxes)
        return _on_host(draw(weights, self._sent(uniforms)))

    @torch.inference_mode()
    def draw_noting(self, softmaxes: Softmaxes, uniforms: Values) -> NotedDraw:
        _, weights = self._weights(softmaxes)
        return NotedDraw(_on_host(draw(weights, self._sent(uniforms))), _on_host(weights.totals), weights)

    @torch.inference_mode()
    def spans(self, softmaxes: Softmaxes, sums: Sums, token_ids: Ids) -> Spans:
        return Spans(*map(_on_host, spans(sums, self._sent(token_ids))))

    @torch.inference_mode()
    def saved(self, logits: Tensor, rows: Sequence[int], token_ids: Sequence[Ids | None]) -> list[Saved]:
        return [
            (ids, logits[row].clone() if ids is None else logits[row, self._sent(ids)])
            for row, ids in zip(rows, token_ids, strict=True)
        ]

    @torch.inference_mode()
    def trace(
        self,
        logits: Tensor,
        rows: Ids,
        histories: Sequence[Sequence[Saved]],
        token_ids: Ids,
        totals: Values,
        width: int,
    ) -> list[TracedRow]:
        states = [self._taken(logits, rows)]  # the last one first; of a row with fewer stages the first one repeats
        for back in range(max(map(len, histories))):
            states.append(states[-1].clone())
            for place, history in enumerate(histories):
                if back < len(history):
                    ids, values = history[-1 - back]
                    states[-1][place, slice(None) if ids is None else self._sent(ids)] = values
        best = [_on_host(_best(state, width)).tolist() for state in states]
        candidates = [
            list(dict.fromkeys((*best[0][place], token, *chain(*(of_state[place] for of_state in best[:0:-1])))))
            for place, token in enumerate(token_ids.tolist())
        ]
        longest = max(map(len, candidates))
        padded = self._sent(np.array([[*ids, *[0] * (longest - len(ids))] for ids in candidates], dtype=np.int64))
        shown = [_shown(state, padded) for state in reversed(states)]
        return [
            TracedRow(
                ids,
                [
                    (tuple([x if x > -math.inf else None for x in own[place][: len(ids)]]), tuple(p[place][: len(ids)]))
                    for own, p in shown[len(shown) - 1 - len(history) :]
                ],
            )
            for place, (ids, history) in enumerate(zip(candidates, histories, strict=True))
        ]

    @torch.inference_mode()
    def rank(self, softmaxes: Softmaxes, width: int) -> Ranking:
        logits, weights = self._weights(softmaxes)
        token_ids = _best(logits, width)
        ranked = weights.at(torch.arange(len(logits), device=self._device), token_ids)
        return Ranking(*(_on_host(tensor) for tensor in (token_ids, ranked, weights.totals)))

    @torch.inference_mode()
    def best(self, logits: Tensor, rows: Ids, width: int) -> Ids:
        return _on_host(_best(self._taken(logits, rows), width))

    @torch.inference_mode()
    def log_softmax(self, softmaxes: Softmaxes, token_ids: Ids) -> Values:
        logits, weights = self._weights(softmaxes)
        peaks, temperatures = self._sent(softmaxes.peaks), self._sent(softmaxes.temperatures)
        above = logits.gather(1, self._sent(token_ids)).double().sub_(peaks.double()[:, None])
        return _on_host(above.div_(temperatures[:, None]) - weights.totals.log()[:, None])

    @torch.inference_mode()
    def host_row(self, logits: Tensor, row: int) -> NDArray[np.float32]:
        return _on_host(logits[row])

    @torch.inference_mode()
    def tensor(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        return self.copy(logits, rows)

    @torch.inference_mode()
    def adopt(self, rows: NDArray[np.float32] | Tensor) -> Tensor:
        return (torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows).to(self._device)

    @torch.inference_mode()
    def replace(self, logits: Tensor, row: int, other: Tensor, other_row: int) -> None:
        logits[row].copy_(other[other_row])

    def _weights(self, softmaxes: Softmaxes) -> tuple[Tensor, Weights]:
        """Returns the rows' own logits, and their weights."""
        logits = self._taken(softmaxes.logits, softmaxes.rows)
        peaks, temperatures = self._sent(softmaxes.peaks), self._sent(softmaxes.temperatures)
        return logits, softmax_weights(logits, peaks, temperatures)

    def _taken(self, logits: Tensor, rows: Ids) -> Tensor:
        return logits if len(rows) == len(logits) else logits[self._sent(rows)]

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _sent(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _changed(operation: Operation, old: Tensor, value: Tensor) -> Tensor:
    if operation is Operation.ADD:
        return old + value
    if operation is Operation.WEAKEN:
        return torch.where(old > 0, old / value, old * value).clamp(max=FLOAT32_MAX)
    return torch.full_like(old, -torch.inf)


def _shown(logits: Tensor, token_ids: Tensor) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the logits [r, vocab] at token_ids [r, k], and their probabilities at temperature 1."""
    weights = softmax_weights(logits, logits.amax(dim=1), torch.ones(len(logits), device=logits.device))
    chosen = weights.blocks.flatten(1).gather(1, token_ids) / weights.totals[:, None]
    return logits.gather(1, token_ids).double().tolist(), chosen.tolist()


def _best(logits: Tensor, width: int) -> Tensor:
    return key_tokens(best_keys(rank_keys(logits), width), logits.shape[1])


def _on_host(values: Tensor) -> NDArray[Any]:
    host: NDArray[Any] = values.cpu().numpy()
    return host
