"""The sampling pipeline, stage by stage, in the order applied.

    frequency, presence, repetition penalty     change logits
    min_new_tokens                              forbids the ends of the output
    logit_bias                                  adds to logits
    custom logit processor                      see custom.py
    grammar mask                                forbids what the constraint does not allow; see grammar_mask.py
    temperature                                 divides the differences between logits
    top_k, top_p, min_p                         cut the ranking, all three measured on the same full softmax
    draw                                        inverse CDF over what is left, in token-id order

Temperature 0 takes the best token (the lowest id among equals) after the stages that change logits.

A parameter that changes logits is one field of SamplingParams and one function here, under `@logit_stage` where it
changes logits, under `@cut` where it drops unlikely tokens. A stage that no row uses is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tureen.sampling.params import SamplingParams
from tureen.sampling.probability import running_sums
from tureen.sampling.slots import Ids, Slot, TokenCounts, Values

Applies = Callable[[SamplingParams], bool]
NO_COUNTS = TokenCounts(())
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class User:
    """A row of the batch that uses a stage."""

    row: int  # index into the batch's logits
    slot: Slot
    num_outputs: int  # output tokens so far

    @property
    def params(self) -> SamplingParams:
        return self.slot.params

    @property
    def output(self) -> TokenCounts:
        return self.slot.output or NO_COUNTS

    @property
    def seen(self) -> TokenCounts:
        return self.slot.seen or NO_COUNTS


class LogitStage(NamedTuple):
    """`run` changes the users' rows of logits [rows, vocab] float32 in place."""

    applies: Applies
    run: Callable[[Tensor, Sequence[User]], None]


@dataclass(frozen=True, slots=True)
class Ranked:
    """The most probable tokens of r rows, best first. Weights are relative to the best token's, which is 1."""

    weights: Tensor  # [r, w] float64
    totals: Tensor  # [r]: sum of the weights over the whole vocabulary
    params: Sequence[SamplingParams]

    def column(self, values: Iterable[float]) -> Tensor:
        """[r] float64"""
        return torch.tensor(list(values), dtype=torch.float64, device=self.weights.device)


class Cut(NamedTuple):
    """`num_kept` says how many leading tokens of each row are kept: [r] int64, at least 1.

    When its rule would go on beyond the w tokens given, it must answer w or more.
    """

    applies: Applies
    num_kept: Callable[[Ranked], Tensor]


LogitStageBody = Callable[[Tensor, Sequence[User]], None]
LOGIT_STAGES: list[LogitStage] = []
CUTS: list[Cut] = []


def logit_stage(applies: Applies) -> Callable[[LogitStageBody], LogitStageBody]:
    def register(run: LogitStageBody) -> LogitStageBody:
        LOGIT_STAGES.append(LogitStage(applies, run))
        return run

    return register


def cut(applies: Applies) -> Callable[[Callable[[Ranked], Tensor]], Callable[[Ranked], Tensor]]:
    def register(rule: Callable[[Ranked], Tensor]) -> Callable[[Ranked], Tensor]:
        CUTS.append(Cut(applies, rule))
        return rule

    return register


# The stages. The order in this file is the order applied.


@logit_stage(lambda p: p.frequency_penalty != 0.0)
def frequency_penalty(logits: Tensor, users: Sequence[User]) -> None:
    """logit -= penalty * count in the output"""
    _change(logits, users, [(u.output.ids, u.output.counts * u.params.frequency_penalty) for u in users], torch.sub)


@logit_stage(lambda p: p.presence_penalty != 0.0)
def presence_penalty(logits: Tensor, users: Sequence[User]) -> None:
    """logit -= penalty if in the output"""
    _change(logits, users, [_same(u.output.ids, u.params.presence_penalty) for u in users], torch.sub)


@logit_stage(lambda p: p.has_repetition_penalty)
def repetition_penalty(logits: Tensor, users: Sequence[User]) -> None:
    """Tokens of prompt or output: a positive logit is divided by the penalty, a negative one multiplied."""

    def penalise(old: Tensor, penalty: Tensor) -> Tensor:
        return torch.where(old > 0, old / penalty, old * penalty).clamp(max=FLOAT32_MAX)

    _change(logits, users, [_same(u.seen.ids, u.params.repetition_penalty) for u in users], penalise)


@logit_stage(lambda p: p.min_new_tokens > 0)
def min_new_tokens(logits: Tensor, users: Sequence[User]) -> None:
    """EOS and stop token ids cannot be drawn until the output is long enough."""
    early = [u for u in users if u.num_outputs < u.params.min_new_tokens]
    ends = [np.array(u.slot.state.end_token_ids, dtype=np.int64) for u in early]
    _change(logits, early, [_same(ids, -np.inf) for ids in ends], lambda _, forbidden: forbidden)


@logit_stage(lambda p: bool(p.logit_bias))
def logit_bias(logits: Tensor, users: Sequence[User]) -> None:
    """logit += bias; a forbidden token stays forbidden"""
    biases = [u.params.logit_bias for u in users]
    additions = [(np.array(list(b), dtype=np.int64), np.array(list(b.values()), dtype=np.float64)) for b in biases]
    _change(logits, users, additions, torch.add)


def temperature(params: Iterable[SamplingParams]) -> list[float]:
    """What the differences between logits are divided by. Log-probabilities of greedy rows are taken at 1."""
    return [1.0 if p.is_greedy else p.temperature for p in params]


@cut(lambda p: p.top_k > 0)
def top_k(ranked: Ranked) -> Tensor:
    """The k most probable tokens"""
    return ranked.column(min(p.top_k, ranked.weights.shape[1]) for p in ranked.params).long()


@cut(lambda p: p.top_p < 1.0)
def top_p(ranked: Ranked) -> Tensor:
    """The smallest set of tokens whose probability reaches top_p"""
    wanted = ranked.column(p.top_p for p in ranked.params) * ranked.totals
    return _num_before(running_sums(ranked.weights) >= wanted[:, None]) + 1


@cut(lambda p: p.min_p > 0.0)
def min_p(ranked: Ranked) -> Tensor:
    """Tokens at least min_p times as probable as the best"""
    return _num_before(ranked.weights < ranked.column(p.min_p for p in ranked.params)[:, None])


# Running them


def uses_cut(params: SamplingParams) -> bool:
    return any(stage.applies(params) for stage in CUTS)


def stages_of(params: SamplingParams) -> tuple[int, ...]:
    return tuple(place for place, stage in enumerate(LOGIT_STAGES) if stage.applies(params))


def run_logit_stages(logits: Tensor, slots: Sequence[Slot], num_outputs: Sequence[int]) -> bool:
    """Change logits [rows, vocab] in place; False when no row uses any stage."""
    users: dict[int, list[User]] = {}
    for row, slot in enumerate(slots):
        for place in slot.stages:
            users.setdefault(place, []).append(User(row, slot, num_outputs[row]))
    for place in sorted(users):
        LOGIT_STAGES[place].run(logits, users[place])
    return bool(users)


def num_kept(weights: Tensor, totals: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """How many leading places of the ranked weights [r, w] the cuts keep together: [r] int64, at most w."""
    kept = torch.full_like(totals, weights.shape[1], dtype=torch.int64)
    for stage in CUTS:
        rows = [row for row, p in enumerate(params) if stage.applies(p)]
        if rows:
            index = torch.tensor(rows, device=weights.device)
            ranked = Ranked(weights[index], totals[index], [params[row] for row in rows])
            kept[index] = torch.minimum(kept[index], stage.num_kept(ranked))
    return kept


def _num_before(reached: Tensor) -> Tensor:
    """[r]: number of places before the first True; all of them where there is none."""
    return torch.where(reached.any(dim=1), reached.byte().argmax(dim=1), reached.shape[1])


def _same(token_ids: Ids, value: float) -> tuple[Ids, Values]:
    return token_ids, np.full(len(token_ids), value)


def _change(
    logits: Tensor,
    users: Sequence[User],
    changes: Sequence[tuple[Ids, Values]],
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """logits[row, ids] = change(logits[row, ids], values), in float64, for each user's (ids, values).

    A row may name an id twice only where both times give the same result.
    """
    if not any(len(ids) for ids, _ in changes):
        return
    rows = np.repeat([user.row for user in users], [len(ids) for ids, _ in changes])
    token_ids = np.concatenate([ids for ids, _ in changes])
    values = np.concatenate([values for _, values in changes])
    row_index, token_index, operand = (torch.from_numpy(a).to(logits.device) for a in (rows, token_ids, values))
    logits[row_index, token_index] = change(logits[row_index, token_index].double(), operand).float()
