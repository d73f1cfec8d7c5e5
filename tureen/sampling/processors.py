"""The sampling pipeline, stage by stage, in the order applied.

    frequency, presence, repetition penalty     change logits
    min_new_tokens                              forbids the ends of the output
    logit_bias                                  adds to logits
    allowed_token_ids                           forbids all other tokens
    bad_words                                   forbids what would complete one of them
    custom logit processor                      see custom.py
    grammar mask                                forbids what the constraint does not allow; see grammar_mask.py
    temperature                                 divides the differences between logits
    top_k, top_p, min_p                         cut the ranking, all three measured on the same full softmax
    typical_p                                   drops what is far from the expected surprise, of what these cuts keep
    draw                                        inverse CDF over what is left, in token-id order

Temperature 0 takes the best token (the lowest id among equals) after the stages that change logits.

A parameter that changes logits is one field of SamplingParams and one function here, under `@logit_stage` where it
changes logits, under `@cut` where it drops unlikely tokens. A stage that no row uses is not run. The functions say on
the host what is to be done; where the logits are, an Arithmetic does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.contract.params import SamplingParams
from tureen.sampling.arithmetic import Arithmetic, Change, Ids, Logits, Operation, Values
from tureen.sampling.slots import Slot, TokenCounts

Applies = Callable[[SamplingParams], bool]
Before = Callable[[str, Mapping[int, Ids | None]], None]
"""Hears of a stage, by its parameter's name, and which tokens of which rows it is going to change; None = all."""
NO_COUNTS = TokenCounts(())
NO_CHANGE: Change = np.zeros(0, dtype=np.int64), np.zeros(0)


@dataclass(frozen=True, slots=True)
class User:
    """A row of the batch that uses a stage."""

    slot: Slot
    num_outputs: int  # output tokens so far
    vocab_size: int  # logits of a row

    @property
    def params(self) -> SamplingParams:
        return self.slot.params

    @property
    def output(self) -> TokenCounts:
        """The tokens of the output among the last repeat_last_n, counted."""
        return self.slot.output or NO_COUNTS

    @property
    def seen(self) -> TokenCounts:
        """The last repeat_last_n tokens of prompt and output, counted."""
        return self.slot.seen or NO_COUNTS


class LogitStage(NamedTuple):
    """A stage that changes logits. `run` returns which of the row's tokens change, and the operation's number for
    each."""

    applies: Applies
    operation: Operation
    run: Callable[[User], Change]


@dataclass(frozen=True, slots=True)
class Ranked:
    """The most probable tokens of r rows, best first. Weights are relative to that of the best token, which is 1."""

    weights: Values  # [r, w]
    totals: Values  # [r]: sum of the weights over the whole vocabulary
    params: Sequence[SamplingParams]

    def column(self, values: Iterable[float]) -> Values:
        """Returns one value for each row as an array [r]."""
        return np.array(list(values), dtype=np.float64)


class Cut(NamedTuple):
    """A stage that drops unlikely tokens. `num_kept` returns how many leading tokens of each row are kept: [r], at
    least 1.

    When its rule would keep more than the w tokens given, it must return w or more.
    """

    applies: Applies
    num_kept: Callable[[Ranked], Ids]


LogitStageBody = Callable[[User], Change]
LOGIT_STAGES: list[LogitStage] = []
CUTS: list[Cut] = []


def logit_stage(applies: Applies, operation: Operation) -> Callable[[LogitStageBody], LogitStageBody]:
    """Registers a function as a stage that changes logits, for rows to whose parameters it `applies`."""

    def register(run: LogitStageBody) -> LogitStageBody:
        LOGIT_STAGES.append(LogitStage(applies, operation, run))
        return run

    return register


def cut(applies: Applies) -> Callable[[Callable[[Ranked], Ids]], Callable[[Ranked], Ids]]:
    """Registers a function as a stage that drops unlikely tokens, for rows to whose parameters it `applies`."""

    def register(rule: Callable[[Ranked], Ids]) -> Callable[[Ranked], Ids]:
        CUTS.append(Cut(applies, rule))
        return rule

    return register


# The stages. The order in this file is the order applied.


@logit_stage(lambda p: p.has_output_penalty and p.frequency_penalty != 0.0, Operation.ADD)
def frequency_penalty(user: User) -> Change:
    """Subtracts penalty * count for each token of the output (OpenAI's API reference)."""
    return user.output.ids, user.output.counts * -user.params.frequency_penalty


@logit_stage(lambda p: p.has_output_penalty and p.presence_penalty != 0.0, Operation.ADD)
def presence_penalty(user: User) -> Change:
    """Subtracts the penalty for each token of the output (OpenAI's API reference)."""
    return _same(user.output.ids, -user.params.presence_penalty)


@logit_stage(lambda p: p.has_repetition_penalty, Operation.WEAKEN)
def repetition_penalty(user: User) -> Change:
    """Divides positive logits of tokens of prompt and output by the penalty, and multiplies negative ones (CTRL,
    arXiv:1909.05858)."""
    return _same(user.seen.ids, user.params.repetition_penalty)


@logit_stage(lambda p: p.min_new_tokens > 0, Operation.FORBID)
def min_new_tokens(user: User) -> Change:
    """Forbids EOS and stop token ids until the output is long enough."""
    if user.num_outputs >= user.params.min_new_tokens:
        return NO_CHANGE
    return _same(np.array(user.slot.state.end_token_ids, dtype=np.int64), -np.inf)


@logit_stage(lambda p: bool(p.logit_bias), Operation.ADD)
def logit_bias(user: User) -> Change:
    """Adds the bias to each logit; a forbidden token stays forbidden."""
    biases = user.params.logit_bias
    return np.array(list(biases), dtype=np.int64), np.array(list(biases.values()), dtype=np.float64)


@logit_stage(lambda p: p.allowed_token_ids is not None, Operation.FORBID)
def allowed_token_ids(user: User) -> Change:
    """Forbids the tokens that are not among the allowed ones (vLLM's parameter)."""
    is_forbidden = np.ones(user.vocab_size, dtype=np.bool_)
    is_forbidden[list(user.params.allowed_token_ids or ())] = False
    return _same(np.flatnonzero(is_forbidden), -np.inf)


@logit_stage(lambda p: bool(p.bad_words), Operation.FORBID)
def bad_words(user: User) -> Change:
    """Forbids the tokens that would complete the tokens of a bad word (vLLM's parameter)."""
    return NO_CHANGE if user.slot.banned is None else _same(user.slot.banned.next_ids(), -np.inf)


def temperature(params: Iterable[SamplingParams]) -> Values:
    """Returns for each row the number by which differences between logits are divided, [r].

    Greedy rows have 1: their log-probabilities are taken at it.
    """
    return np.array([1.0 if p.is_greedy else p.temperature for p in params])


@cut(lambda p: p.top_k > 0)
def top_k(ranked: Ranked) -> Ids:
    """Keeps the k most probable tokens (Fan et al., arXiv:1805.04833)."""
    width = ranked.weights.shape[1]
    return np.array([min(p.top_k, width) for p in ranked.params], dtype=np.int64)


@cut(lambda p: p.top_p < 1.0)
def top_p(ranked: Ranked) -> Ids:
    """Keeps the smallest set of tokens whose probability reaches top_p (Holtzman et al., arXiv:1904.09751)."""
    least = ranked.column(p.top_p for p in ranked.params) * ranked.totals
    return _num_before(np.cumsum(ranked.weights, axis=1) >= least[:, None]) + 1


@cut(lambda p: p.min_p > 0.0)
def min_p(ranked: Ranked) -> Ids:
    """Keeps the tokens that are at least min_p times as probable as the best (arXiv:2407.01082)."""
    return _num_before(ranked.weights < ranked.column(p.min_p for p in ranked.params)[:, None])


def typical_p(weights: Values, masses: Sequence[float]) -> NDArray[np.bool_]:
    """Returns which tokens of each row are locally typical: [r, w] (Meister et al., arXiv:2202.00666).

    They are those whose surprise, -log p, is nearest the entropy of the distribution: the fewest whose probability
    reaches the row's mass, and all that are as near as the last of them. `weights` [r, w] is zero where another cut has
    dropped a token. Sums go along a row one by one, so that the width of the others changes nothing.
    """
    shares = weights / np.cumsum(weights, axis=1)[:, -1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(shares)
        parts = np.where(shares > 0, shares * surprise, 0.0)
    distance = np.abs(surprise - np.cumsum(parts, axis=1)[:, -1:])  # inf where nothing is left
    order = np.argsort(distance, axis=1, kind="stable")
    reached = np.cumsum(np.take_along_axis(shares, order, axis=1), axis=1) >= np.array(masses)[:, None]
    last = np.where(reached.any(axis=1), reached.argmax(axis=1), np.count_nonzero(shares, axis=1) - 1)
    rows = np.arange(len(weights))
    typical: NDArray[np.bool_] = (distance <= distance[rows, order[rows, last]][:, None]) & (weights > 0)
    return typical


# Running them


def uses_cut(params: SamplingParams) -> bool:
    """Says whether any cut applies to these parameters."""
    return params.typical_p < 1.0 or any(stage.applies(params) for stage in CUTS)


def stages_of(params: SamplingParams) -> tuple[int, ...]:
    """Returns the indices of the stages that apply to these parameters."""
    return tuple(place for place, stage in enumerate(LOGIT_STAGES) if stage.applies(params))


def run_logit_stages(
    arithmetic: Arithmetic,
    logits: Logits,
    slots: Sequence[Slot],
    num_outputs: Sequence[int],
    before: Before | None = None,
) -> bool:
    """Changes logits [rows, vocab] in place. Returns False when no row uses any stage.

    before: is called with each stage's name and what it is going to change.
    """
    rows_of: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        for place in slot.stages:
            rows_of.setdefault(place, []).append(row)
    for place in sorted(rows_of):
        stage = LOGIT_STAGES[place]
        changes = {row: stage.run(User(slots[row], num_outputs[row], logits.shape[1])) for row in rows_of[place]}
        changed = {row: change for row, change in changes.items() if len(change[0])}
        if changed and before is not None:
            before(stage.run.__name__, {row: token_ids for row, (token_ids, _) in changed.items()})
        if changed:
            arithmetic.change(logits, stage.operation, list(changed), list(changed.values()))
    return bool(rows_of)


def num_kept(weights: Values, totals: Values, params: Sequence[SamplingParams]) -> Ids:
    """Returns how many leading places of the ranked weights [r, w] the cuts keep together: [r], at most w.

    totals: the sum of all weights of each row, [r].
    """
    kept = np.full(len(weights), weights.shape[1], dtype=np.int64)
    for _, rows, kept_by_one in kept_by_cut(weights, totals, params):
        kept[rows] = np.minimum(kept[rows], kept_by_one)
    return kept


def kept_by_cut(
    weights: Values, totals: Values, params: Sequence[SamplingParams]
) -> Iterator[tuple[str, list[int], Ids]]:
    """Yields, for each cut that any row uses, its parameter's name, those rows, and how many places it keeps of
    each."""
    for stage in CUTS:
        rows = [row for row, p in enumerate(params) if stage.applies(p)]
        if rows:
            ranked = Ranked(weights[rows], totals[rows], [params[row] for row in rows])
            yield stage.num_kept.__name__, rows, stage.num_kept(ranked)


def _num_before(reached: NDArray[np.bool_]) -> Ids:
    """Returns the number of places before the first True, [r]; all of them where there is none."""
    first: Ids = np.where(reached.any(axis=1), reached.argmax(axis=1), reached.shape[1])
    return first


def _same(token_ids: Ids, value: float) -> Change:
    return token_ids, np.full(len(token_ids), value)
