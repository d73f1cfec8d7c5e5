"""Logits to tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tureen.grammar.base import Mask
from tureen.runner.base import NAN_LOGITS, NOTHING_TO_DRAW, RowError, RowOutput, SlotState
from tureen.sampling import grammar_mask, logprobs, processors, random
from tureen.sampling.custom import CustomProcessors
from tureen.sampling.params import SamplingParams
from tureen.sampling.probability import (
    Weights,
    best_keys,
    draw,
    in_blocks,
    key_tokens,
    peak_tokens,
    rank_keys,
    softmax_weights,
)
from tureen.sampling.slots import Slot, start_slot
from tureen.types import LogprobSpec, PositionLogprobs

RANKING_WIDTHS = (256, 4096)  # tokens ranked at first, and where the cuts reach further; then the whole vocabulary
SCORED_TOGETHER = 16  # prompt positions; bounds the float64 working memory
NO_LOGPROBS = LogprobSpec()
NO_MASKS: Mapping[int, Mask] = {}


class Sampler:
    """Draws the next token of each row of a batch. Rows are independent: a row's result does not depend on the others.

    A failed row (NaN or +Inf among its logits, or no token that may be drawn) leaves its slot as it was, and so does a
    call that raises.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str,
        processors: CustomProcessors | None = None,
    ) -> None:
        self._custom = processors or CustomProcessors({})
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._slots: list[Slot | None] = [None] * max_rows

    def set_slot(self, state: SlotState) -> None:
        """A sequence takes the slot. Nothing of the one that held it before remains."""
        held = self._slots[state.slot]
        if held is not None and held.custom is not None:
            self._custom.leave(held.custom)
        custom = self._custom.start(state) if state.processor else None
        self._slots[state.slot] = start_slot(state, processors.stages_of(state.params), custom)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Mapping[int, Mask] = NO_MASKS,
    ) -> list[RowOutput]:
        """One token per row of logits [rows, vocab] float32, which are overwritten.

        positions[i] is the absolute index, in its sequence, of the token being drawn for slots[i]; masks has the tokens
        that its grammar allows, by slot. A failed row gets error NAN_LOGITS, or NOTHING_TO_DRAW where the mask leaves
        no token.
        """
        if logits.shape != (len(slots), self._vocab_size):
            raise ValueError(f"logits {tuple(logits.shape)} for {len(slots)} rows and {self._vocab_size} tokens")
        if not slots:
            return []
        logits = logits.float()
        batch = [self._slot(slot) for slot in slots]
        raw = {row: logits[row].clone() for row, slot in enumerate(batch) if _wants_raw(slot)}
        peaks = logits.amax(dim=1)
        sound = peaks.isfinite()
        num_outputs = [position - len(slot.state.prompt_ids) for slot, position in zip(batch, positions, strict=True)]
        if processors.run_logit_stages(logits, batch, num_outputs):
            peaks = logits.amax(dim=1)
            sound &= peaks.isfinite()
        failures: dict[int, RowError] = {}
        if any(slot.custom is not None for slot in batch):
            states = [slot.custom if ok else None for slot, ok in zip(batch, sound.tolist(), strict=True)]
            failures = self._custom.apply(logits, peaks, states)
        if masks:
            constrained = [row for row, slot in enumerate(slots) if slot in masks and row not in failures]
            grammar_mask.apply(logits, constrained, [masks[slots[row]] for row in constrained])
            peaks = logits.amax(dim=1)
            stuck = [row for row in constrained if peaks[row] == -math.inf]
            failures |= {row: NOTHING_TO_DRAW for row in stuck if sound[row]}
        drawn = self._draw(logits, peaks, batch, positions)
        token_ids, are_sound = torch.stack((drawn, sound)).tolist()
        good = [row for row, is_sound in enumerate(are_sound) if is_sound and row not in failures]
        reports = _output_logprobs(logits, raw, batch, token_ids, good)
        for row in good:
            batch[row].record(token_ids[row])
        return [
            RowOutput(token_id=token_ids[row], logprobs=reports.get(row))
            if row in good
            else RowOutput(error=failures.get(row, NAN_LOGITS))
            for row in range(len(batch))
        ]

    def close(self) -> None:
        """End the processes of custom logit processors."""
        self._custom.close()

    @torch.inference_mode()
    def score(self, logits: Tensor, slot: int, targets: Sequence[int]) -> tuple[PositionLogprobs, ...]:
        """Prompt log-probabilities: log softmax of the model's own logits [len(targets), vocab] at each target."""
        spec = self._slot(slot).state.logprobs or NO_LOGPROBS
        positions: list[PositionLogprobs] = []
        for start in range(0, len(targets), SCORED_TOGETHER):
            part = targets[start : start + SCORED_TOGETHER]
            rows = logits[start : start + len(part)].float()
            positions += logprobs.report(rows, part, [1.0] * len(part), [spec] * len(part))
        return tuple(positions)

    def catch_up(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Tokens at positions start, … of a sequence: its output may have grown by tokens that were not drawn here."""
        held = self._slots[slot]
        if held is not None:
            known = len(held.state.prompt_ids) + held.num_outputs
            for token_id in token_ids[max(0, known - start) :]:
                held.record(token_id)

    def _slot(self, slot: int) -> Slot:
        held = self._slots[slot]
        if held is None:
            raise LookupError(f"slot {slot} was never set")
        return held

    def _draw(self, logits: Tensor, peaks: Tensor, batch: Sequence[Slot], positions: Sequence[int]) -> Tensor:
        """Token ids [rows]. Rows that are not sound get any id of the vocabulary."""
        greedy, plain, filtered = _ways_to_draw([slot.params for slot in batch])
        tokens = torch.zeros(len(batch), dtype=torch.int64, device=self._device)
        if greedy:
            rows = self._index(greedy)
            tokens[rows] = peak_tokens(_take(logits, rows), peaks[rows])
        for group in (plain, filtered):
            if not group:
                continue
            rows = self._index(group)
            params = [batch[row].params for row in group]
            temperatures = torch.tensor(processors.temperature(params), dtype=torch.float64, device=self._device)
            seeds = [batch[row].state.seed for row in group]
            uniforms = torch.from_numpy(random.uniform(seeds, [positions[row] for row in group])).to(self._device)
            part, part_peaks = _take(logits, rows), peaks[rows]
            weights = softmax_weights(part, part_peaks, temperatures)
            if group is filtered:
                weights = _cut_weights(part, part_peaks.isfinite(), weights, params)
            tokens[rows] = draw(weights, uniforms)
        return tokens

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)


def _wants_raw(slot: Slot) -> bool:
    return slot.state.logprobs is not None and slot.state.logprobs.mode == "raw"


def _output_logprobs(
    logits: Tensor, raw: dict[int, Tensor], batch: Sequence[Slot], token_ids: Sequence[int], rows: Sequence[int]
) -> dict[int, PositionLogprobs]:
    """Of those of `rows` that ask. `raw` holds the model's own logits [vocab] of the rows that want these."""
    asking = [row for row in rows if batch[row].state.logprobs is not None]
    if not asking:
        return {}
    for row, own in raw.items():
        logits[row] = own
    temperatures = processors.temperature(batch[row].params for row in asking)
    reports = logprobs.report(
        _take(logits, torch.tensor(asking, device=logits.device)),
        [token_ids[row] for row in asking],
        [1.0 if row in raw else value for row, value in zip(asking, temperatures, strict=True)],
        [batch[row].state.logprobs or NO_LOGPROBS for row in asking],
    )
    return dict(zip(asking, reports, strict=True))


def _cut_weights(logits: Tensor, sound: Tensor, weights: Weights, params: Sequence[SamplingParams]) -> Weights:
    """The weights that the cuts keep, the others 0. Only rows that keep many tokens are ranked far."""
    vocab_size = logits.shape[1]
    keys = rank_keys(logits)
    least_kept = torch.zeros_like(keys[:, 0])
    waiting = list(range(len(params)))
    for width in (*RANKING_WIDTHS, vocab_size):
        rows = torch.tensor(waiting, device=logits.device)
        best = best_keys(_take(keys, rows), width)
        ranked = weights.at(rows, key_tokens(best, vocab_size))
        kept = processors.num_kept(ranked, weights.totals[rows], [params[row] for row in waiting])
        least_kept[rows] = best.gather(1, kept[:, None] - 1)[:, 0]
        settled = ((kept < best.shape[1]) | ~sound[rows]).tolist()
        waiting = [row for row, is_settled in zip(waiting, settled, strict=True) if not is_settled]
        if not waiting or width >= vocab_size:
            break
    every = weights.blocks.flatten(1)[:, :vocab_size]
    return in_blocks(torch.where(keys >= least_kept[:, None], every, 0.0))


def _ways_to_draw(params: Sequence[SamplingParams]) -> tuple[list[int], list[int], list[int]]:
    """Rows that take the best token, that draw from all tokens, and that draw from what the cuts keep."""
    greedy = [row for row, p in enumerate(params) if p.is_greedy]
    filtered = [row for row, p in enumerate(params) if not p.is_greedy and processors.uses_cut(p)]
    plain = [row for row, p in enumerate(params) if not p.is_greedy and not processors.uses_cut(p)]
    return greedy, plain, filtered


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
