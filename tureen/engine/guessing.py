"""Guesses the next tokens of a sequence that repeats itself or recent outputs of its client, if that pays.

The guess is the text that followed the previous occurrence of the last tokens (prompt lookup decoding, Saxena 2023), or
what a draft model draws. Guesses change no token. They cost time in a step and save steps:
docs/decisions/0144-guesses-that-pay.md. The clock here measures steps, and only decides the number of guessed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tureen.contract.runner import RowOutput
from tureen.contract.types import NO_TOKEN
from tureen.engine.draft_model import DraftModel
from tureen.engine.scheduler import StepPlan
from tureen.engine.sequence import Sequence

MOST_GUESSES = 16  # of a sequence in a step
MARGIN = 1.1
"""Minimum ratio of a guess's gain to its cost, because masks, draws and texts of wrong guesses also cost a little."""
FIRST_CHANCES = ((16, 0.8), (6, 0.65), (3, 0.5), (2, 0.3))
"""The assumed chance that a guess is right, by the number of matching tokens before it, until guesses are verified."""
FIRST_DRAFT_CHANCE = 0.7  # the assumed chance that a guess of the draft model is right
FIRST_DRAFT_COST = 0.1  # the assumed time of a draft model's round in plain steps, until one is measured
MOST_DRAFTED = 8  # guesses of a draft model for a sequence in a step
TRUST = 4.0  # number of verified guesses that weigh as much as the assumed chance
FADE = 0.97  # with each drawn token, because an output may begin to repeat itself
RECENT_OUTPUTS, RECENT_TOKENS = 4, 1024  # of a client: outputs that are kept, and tokens of each
LEAST_TOKENS = 3  # of an output that is kept: two that match, and one that follows them
MAX_CLIENTS = 64  # with recent outputs; those whose last output ended longest ago are dropped
RATE = 0.1  # of the moving averages of times
DRIFT = 0.001
"""Rate at which a measured cost returns to the assumed one in plain steps, so that guesses are tried again."""
FIRST_BASE, FIRST_COST = 0.75, 0.25
"""Assumed time of a step over n rows, relative to one row, until guesses are measured: FIRST_BASE + FIRST_COST * n."""


class Acceptance:
    """How often recent guesses were right."""

    def __init__(self) -> None:
        self._verified = self._right = 0.0

    def chance(self, first: float) -> float:
        """Returns the estimated chance that the next guess is right. `first`: the assumed chance."""
        return (self._right + TRUST * first) / (self._verified + TRUST)

    def verified(self, num_guessed: int, num_right: int) -> None:
        """Records the number of right guesses in a step. Guesses after the first wrong one were not verified."""
        self.fade(FADE ** (num_right + 1))
        self._verified += min(num_right + 1, num_guessed)
        self._right += num_right

    def fade(self, share: float) -> None:
        """Lets the assumed chance count for more again: keeps `share` of what was seen."""
        self._verified *= share
        self._right *= share


class Guesses:
    """An index of what one sequence may repeat, and how often guesses were right."""

    def __init__(self, history: Any) -> None:
        """`history`: a native History with the recent outputs of the sequence's client."""
        self._history = history
        self._num_recent = len(history)
        self.repeated = Acceptance()
        self.drafted = Acceptance()

    def look_up(self, token_ids: list[int], most: int) -> tuple[list[int], int]:
        """Return at most `most` tokens that followed the last occurrence of the end, and how many before them agree."""
        self._history.append(token_ids[len(self._history) - self._num_recent :])
        guesses: tuple[list[int], int] = self._history.look_up(most)
        return guesses


class GuessCost(NamedTuple):
    """Measured times of steps with a given number of rows that draw."""

    plain_s: float  # without guesses
    cost: float  # of a guess, as a share of plain_s


class Guesser:
    """Guesses tokens of an engine's sequences, and learns when that pays."""

    def __init__(self, kernels: ModuleType, clock: Callable[[], float] = time.perf_counter) -> None:
        self._new_history: Callable[[], Any] = kernels.History
        self._clock = clock
        self._times: dict[int, GuessCost] = {}
        self._guesses = WeakKeyDictionary[Sequence, Guesses]()
        self._recent: dict[tuple[str, str, str], tuple[list[int], ...]] = {}
        self.draft_model: DraftModel | None = None
        self._drafted = Acceptance()  # of all sequences
        self._drafting: list[Sequence] = []  # in the step that is planned
        self.saved_s = 0.0  # estimated time of the steps that right guesses saved, without what guesses cost

    def guess(self, sequence: Sequence, most: int, num_rows: int) -> tuple[int, ...]:
        """Returns guesses of the next tokens, at most `most`, in a step over `num_rows` rows that draw."""
        times = self._times.get(bucket(num_rows))
        worth = 1.0 if times is None else MARGIN * times.cost * num_rows  # a step without guesses is measured first
        if worth >= 1:
            return ()
        guesses = self._of(sequence)
        if guesses.repeated.chance(1.0) <= worth:  # no match is better
            return ()
        tokens, match = guesses.look_up(sequence.token_ids, min(most, MOST_GUESSES))
        if not match:
            return ()
        chance = guesses.repeated.chance(next(first for length, first in FIRST_CHANCES if match >= length))
        if self.draft_model is not None and chance < self._draft_chance(sequence):
            return ()
        count, all_right = 0, chance
        while count < len(tokens) and tokens[count] >= 0 and all_right > worth:  # a picture's tokens are negative
            count, all_right = count + 1, all_right * chance
        return tuple(tokens[:count])

    def draft(self, asking: list[Sequence], most: list[int], num_rows: int) -> list[tuple[int, ...]]:
        """Returns the draft model's guesses of sequences that repeat nothing, at most `most[i]` of `asking[i]`, in a
        step over `num_rows` rows that draw."""
        guesses: list[tuple[int, ...]] = [()] * len(asking)
        times = self._times.get(bucket(num_rows))
        model = self.draft_model
        if model is None or times is None:
            return guesses
        counts = [min(count, MOST_DRAFTED) for count in most]
        for _ in range(2):  # the fewer sequences share a round, the more each guess costs
            num_sharing = sum(map(bool, counts))
            if num_sharing:
                counts = self._paying(model, times, asking, counts, (num_rows, num_sharing))
        chosen = [index for index, count in enumerate(counts) if count]
        if chosen:
            start_s = self._clock()
            self._drafting = [asking[index] for index in chosen]
            drafted = model.draft(self._drafting, [counts[index] for index in chosen])
            for index, tokens in zip(chosen, drafted, strict=True):
                guesses[index] = tokens
            self.saved_s -= self._clock() - start_s
        return guesses

    def _paying(
        self, model: DraftModel, times: GuessCost, asking: list[Sequence], most: list[int], sharing: tuple[int, int]
    ) -> list[int]:
        """Returns how many guesses of each sequence pay. sharing: the rows that draw, and those that get guesses."""
        num_rows, num_sharing = sharing
        round_s = model.round_s.get(num_sharing)
        round_cost = FIRST_DRAFT_COST if round_s is None else round_s / times.plain_s
        worth = MARGIN * num_rows * (times.cost + round_cost / num_sharing)
        counts = []
        for sequence, limit in zip(asking, most, strict=True):
            chance, count = self._draft_chance(sequence), 0
            while count < limit and chance ** (count + 1) > worth:
                count += 1
            if count and model.takes(sequence, count):
                num_left = sequence.terms.max_tokens - sequence.num_tokens
                saving_s = num_left * (chance - worth) * times.plain_s / num_rows
                counts.append(count if (model.num_missing(sequence) - 1) * model.token_s <= saving_s else 0)
            else:
                counts.append(0)
        return counts

    def _draft_chance(self, sequence: Sequence) -> float:
        return self._of(sequence).drafted.chance(self._drafted.chance(FIRST_DRAFT_CHANCE))

    def run(self, plan: StepPlan, run: Callable[[StepPlan], tuple[RowOutput, ...]]) -> tuple[RowOutput, ...]:
        """Runs a step. Records which guesses were right, and its time if all its rows draw after one known token."""
        drafting, self._drafting = self._drafting, []
        start_s = self._clock()
        outputs = run(plan)
        if all(row.sample and row.num_known == 1 for row in plan.rows):
            seconds = self._clock() - start_s
            num_guesses = sum(row.num_drafts for row in plan.rows)
            if num_guesses and (times := self._times.get(bucket(len(plan.rows)))):
                num_right = sum(len(output.token_ids) - 1 for output in outputs if output.token_ids)
                self.saved_s += times.plain_s * (1 + num_right / len(plan.rows)) - seconds
            self._learn(len(plan.rows), num_guesses, seconds)
        for sequence, row, output in zip(plan.sequences, plan.rows, outputs, strict=True):
            if row.num_drafts and output.token_ids:
                right, guesses = len(output.token_ids) - 1, self._of(sequence)
                if sequence in drafting:
                    self._drafted.verified(row.num_drafts, right)
                    guesses.drafted.verified(row.num_drafts, right)
                else:
                    guesses.repeated.verified(row.num_drafts, right)
        return outputs

    def ended(self, sequence: Sequence) -> None:
        """Keep the end of an output: its client's next ones may repeat it."""
        output = sequence.token_ids[sequence.terms.num_prompt :][-RECENT_TOKENS:]
        if len(output) < LEAST_TOKENS:
            return
        space = _space(sequence)
        recent = self._recent.pop(space, ())
        self._recent[space] = (*recent, output)[-RECENT_OUTPUTS:]
        if len(self._recent) > MAX_CLIENTS:
            del self._recent[next(iter(self._recent))]

    def clear(self) -> None:
        """Drop the recent outputs, and what the draft model computed."""
        self._recent.clear()
        if self.draft_model is not None:
            self.draft_model.clear()

    def close(self) -> None:
        """Release the draft model."""
        if self.draft_model is not None:
            self.draft_model.close()

    def _of(self, sequence: Sequence) -> Guesses:
        guesses = self._guesses.get(sequence)
        if guesses is None:
            history = self._new_history()
            for output in self._recent.get(_space(sequence), ()):
                history.append([*output, NO_TOKEN])
            guesses = self._guesses[sequence] = Guesses(history)
        return guesses

    def _learn(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        rows, first_cost = bucket(num_rows), FIRST_COST / (FIRST_BASE + FIRST_COST * num_rows)
        plain_s, cost = self._times.get(rows, (seconds, first_cost))
        if num_guesses:
            seen = min(max(0.0, seconds / plain_s - 1) / num_guesses, 1.0)  # more: something else delayed the step
            cost += RATE * (seen - cost)
        else:
            plain_s += RATE * (seconds - plain_s)
            cost += DRIFT * (first_cost - cost)
            self._drafted.fade(1 - DRIFT)
            if self.draft_model is not None:
                self.draft_model.fade(1 - DRIFT)
        self._times[rows] = GuessCost(plain_s, cost)


def _space(sequence: Sequence) -> tuple[str, str, str]:
    """Return the key of requests that may draw guesses from each other's outputs."""
    return sequence.request.client, *sequence.request.cache_space


def bucket(num_rows: int) -> int:
    """Returns the bucket of a number of rows. Steps of one bucket take about the same time."""
    return num_rows if num_rows <= 16 else 16 * num_rows.bit_length()
