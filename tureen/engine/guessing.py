"""Guesses the next tokens of a sequence that repeats itself or recent outputs of its client, if that pays.

The guess is the text that followed the previous occurrence of the last tokens (prompt lookup decoding, Saxena 2023), or
what a draft model draws. Guesses change no token. They cost time in a step and save steps:
docs/decisions/0144-guesses-that-pay.md. The clock here measures steps, and only decides the number of guessed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from tureen.contract.runner import RowOutput
from tureen.contract.types import NO_TOKEN
from tureen.engine.scheduler import Grow, StepPlan
from tureen.engine.sequence import Sequence
from tureen.log import get_logger

if TYPE_CHECKING:
    from tureen.engine.draft_model import DraftModel

MOST_GUESSES = 16  # of a sequence in a step
MARGIN = 1.1
"""Minimum ratio of a guess's gain to its cost, because masks, draws and texts of wrong guesses also cost a little."""
FIRST_CHANCES = ((16, 0.8), (6, 0.65), (3, 0.5), (2, 0.3))
"""The assumed chance that a guess is right, by the number of matching tokens before it, until guesses are verified."""
FIRST_DRAFT_CHANCE = 0.7  # the assumed chance that a guess of the draft model is right
MOST_DRAFTED = 8  # guesses of a draft model for a sequence in a step
MOST_SAVING = 256  # further tokens of an output that are assumed to be guessed, because most end before their limit
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

DRAFT_MODEL_FAILED = (
    "the draft model failed, so the server continues without it; restart the server to use it again, or leave "
    "--draft-model out"
)

log = get_logger("engine")


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
        self._drafting: dict[Sequence, int] = {}  # drafted tokens of each sequence in the step that is planned
        self.saved_s = 0.0  # estimated time of the steps that right guesses saved, without what guesses cost

    def guess(self, sequence: Sequence, most: int, num_rows: int) -> tuple[int, ...]:
        """Returns guesses of the next tokens, at most `most`, in a step over `num_rows` rows that draw."""
        if sequence in self._drafting:  # the grammar allows none of its guesses
            return ()
        worth = self._worth(num_rows)
        tokens, chance = self._repeated(sequence, min(most, MOST_GUESSES), worth)
        count, all_right = 0, chance
        while count < len(tokens) and tokens[count] >= 0 and all_right > worth:  # a picture's tokens are negative
            count, all_right = count + 1, all_right * chance
        return tuple(tokens[:count])

    def draft(self, asking: list[Sequence], budget: int, num_rows: int, grow: Grow) -> list[tuple[int, ...]]:
        """Returns the draft model's guesses of each sequence, at most `budget` together, in a step over `num_rows` rows
        that draw. A sequence gets some if they pay and are more likely to be right than repeated text."""
        guesses: list[tuple[int, ...]] = [()] * len(asking)
        times = self._times.get(bucket(num_rows))
        model = self.draft_model
        if model is None or times is None:
            return guesses
        model.expect(times.plain_s)
        worth = self._worth(num_rows)
        counts = [min(MOST_DRAFTED, sequence.num_left - 1) for sequence in asking]
        for index, sequence in enumerate(asking):
            if self._repeated(sequence, 1, worth)[1] >= self._draft_chance(sequence):
                counts[index] = 0
        for _ in range(2):  # the fewer sequences share a round, the more each guess costs
            num_sharing = sum(map(bool, counts))
            if num_sharing:
                counts = self._paying(model, times, asking, counts, (num_rows, num_sharing))
        counts = _within(budget, counts)
        chosen = [index for index, count in enumerate(counts) if count and grow(asking[index], count)]
        if chosen:
            start_s = self._clock()
            drafted = self._ask(model, [asking[index] for index in chosen], [counts[index] for index in chosen])
            for index, tokens in zip(chosen, drafted, strict=False):
                if tokens:
                    self._drafting[asking[index]] = len(tokens)
                    guesses[index] = tokens[:-1] if tokens[-1] == NO_TOKEN else tokens
            self.saved_s -= self._clock() - start_s
        return guesses

    def _worth(self, num_rows: int) -> float:
        """Returns the chance from which a guess pays; 1 before a step without guesses was measured."""
        times = self._times.get(bucket(num_rows))
        return 1.0 if times is None else MARGIN * times.cost * num_rows

    def _repeated(self, sequence: Sequence, most: int, worth: float) -> tuple[list[int], float]:
        """Returns at most `most` tokens that may be repeated, and the chance that the first is right; none if even a
        long match would not be worth it."""
        if worth >= 1:
            return [], 0.0
        guesses = self._of(sequence)
        if guesses.repeated.chance(1.0) <= worth:  # no match is better
            return [], 0.0
        tokens, match = guesses.look_up(sequence.token_ids, most)
        if not match or tokens[0] < 0:  # nothing, or a picture or the next output, follows the match
            return [], 0.0
        chance = guesses.repeated.chance(next(first for length, first in FIRST_CHANCES if match >= length))
        return (tokens, chance) if chance > worth else ([], 0.0)

    def _paying(
        self, model: DraftModel, times: GuessCost, asking: list[Sequence], most: list[int], sharing: tuple[int, int]
    ) -> list[int]:
        """Returns how many guesses of each sequence pay. sharing: the rows that draw, and those that get guesses."""
        num_rows, num_sharing = sharing
        round_cost = model.expected_s(num_sharing) / times.plain_s
        worth = MARGIN * num_rows * (times.cost + round_cost / num_sharing)
        counts = []
        for sequence, limit in zip(asking, most, strict=True):
            chance, count = self._draft_chance(sequence), 0
            while count < limit and chance ** (count + 1) > worth:
                count += 1
            if count and model.takes(sequence, count):
                num_saving = min(sequence.num_left, MOST_SAVING)
                saving_s = num_saving * (chance - worth) * times.plain_s / num_rows
                counts.append(count if (model.num_missing(sequence) - 1) * model.token_s <= saving_s else 0)
            else:
                counts.append(0)
        return counts

    def _ask(self, model: DraftModel, asking: list[Sequence], counts: list[int]) -> list[tuple[int, ...]]:
        """Returns the draft model's guesses; none, and no draft model any more, if it fails."""
        try:
            return model.draft(asking, counts)
        except Exception:  # guesses change no token, so the requests continue without them
            log.exception(DRAFT_MODEL_FAILED)
            self._give_up()
            return []

    def _give_up(self) -> None:
        """Releases a draft model that has failed."""
        model, self.draft_model = self.draft_model, None
        if model is not None:
            with suppress(Exception):
                model.close()

    def _draft_chance(self, sequence: Sequence) -> float:
        return self._of(sequence).drafted.chance(self._drafted.chance(FIRST_DRAFT_CHANCE))

    def run(self, plan: StepPlan, run: Callable[[StepPlan], tuple[RowOutput, ...]]) -> tuple[RowOutput, ...]:
        """Runs a step. Records which guesses were right, and its time if all its rows draw after one known token."""
        drafting, self._drafting = self._drafting, {}
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
            if output.token_ids:
                self._verified(sequence, row.num_drafts, len(output.token_ids) - 1, drafting.get(sequence, 0))
        return outputs

    def _verified(self, sequence: Sequence, num_guessed: int, num_right: int, num_drafted: int) -> None:
        """Records how many guesses of a step were right. A drafted guess that the grammar cut off counts as wrong."""
        if num_drafted:
            num_guessed = min(num_guessed + 1, num_drafted)
            self._drafted.verified(num_guessed, num_right)
            self._of(sequence).drafted.verified(num_guessed, num_right)
        elif num_guessed:
            self._of(sequence).repeated.verified(num_guessed, num_right)

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
            try:
                self.draft_model.clear()
            except Exception:
                log.exception(DRAFT_MODEL_FAILED)
                self._give_up()

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
                self.draft_model.expect(plain_s, DRIFT)
        self._times[rows] = GuessCost(plain_s, cost)


def _space(sequence: Sequence) -> tuple[str, str, str]:
    """Return the key of requests that may draw guesses from each other's outputs."""
    return sequence.request.client, *sequence.request.cache_space


def _within(budget: int, counts: list[int]) -> list[int]:
    """Returns the counts, reduced to equal shares of the budget if they exceed it."""
    shares, num_left = [0] * len(counts), sum(map(bool, counts))
    for index, count in enumerate(counts):
        if count:
            shares[index] = min(count, -(-budget // num_left))
            budget, num_left = budget - shares[index], num_left - 1
    return shares


def bucket(num_rows: int) -> int:
    """Returns the bucket of a number of rows. Steps of one bucket take about the same time."""
    return num_rows if num_rows <= 16 else 16 * num_rows.bit_length()
