"""The sampler's state of each sequence, by slot.

It is kept on the host: it is small, and one transfer a stage sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tureen.contract.params import SamplingParams
from tureen.contract.runner import SlotState
from tureen.contract.types import NO_TOKEN
from tureen.sampling.arithmetic import Ids, Values
from tureen.sampling.banned import Banned
from tureen.sampling.custom import CustomState


class TokenCounts:
    """Counts how often each distinct token occurs among the last `window` tokens; -1 = among all.

    Takes memory for the distinct tokens, and for the window. NO_TOKEN has a place in the window, and is not counted.
    """

    def __init__(self, token_ids: Sequence[int], window: int = -1) -> None:
        last = token_ids if window < 0 else token_ids[max(0, len(token_ids) - window) :]
        self._window = None if window < 0 else deque(last)
        self._size = window
        self._ids, counts = np.unique(
            np.array([token_id for token_id in last if token_id != NO_TOKEN], dtype=np.int64), return_counts=True
        )
        self._counts = counts.astype(np.float64)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> Ids:
        """The distinct tokens that occurred."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Values:
        """How often each of `ids` occurred."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Counts one more token, and no longer the oldest of a full window."""
        if self._window is not None:
            self._window.append(token_id)
            if len(self._window) > self._size:
                self._remove(self._window.popleft())
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                spare = 8 + place
                self._ids = np.concatenate((self._ids, np.zeros(spare, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(spare)))
            self._ids[place], self._counts[place] = token_id, 0
        self._counts[place] += 1

    def _remove(self, token_id: int) -> None:
        if token_id == NO_TOKEN:
            return
        place = self._places[token_id]
        self._counts[place] -= 1
        if self._counts[place] == 0:  # the last token takes its place
            del self._places[token_id]
            last = len(self._places)
            if place != last:
                moved = int(self._ids[last])
                self._ids[place], self._counts[place], self._places[moved] = moved, self._counts[last], place


@dataclass(slots=True)
class Slot:
    """The sampler's state of one sequence. Only the counts change, with each output token."""

    state: SlotState
    stages: tuple[int, ...]  # places in LOGIT_STAGES of the stages it uses
    output: TokenCounts | None  # where frequency or presence is penalised
    seen: TokenCounts | None  # prompt and output, where repetition is penalised
    custom: CustomState | None  # where a custom logit processor is used
    banned: Banned | None  # where there are sequences of tokens that may not come
    num_outputs: int  # tokens of the output so far, where it follows them
    is_plain: bool  # takes the best token, and reports nothing

    @property
    def follows(self) -> bool:
        """Says whether `record` must be called for every token of the output."""
        states = (self.output, self.seen, self.custom, self.banned)
        return any(state is not None for state in states)

    @property
    def params(self) -> SamplingParams:
        return self.state.params

    def record(self, token_id: int) -> None:
        """Adds one output token."""
        self.num_outputs += 1
        for counts in (self.output, self.seen):
            if counts is not None:
                counts.add(token_id)
        if self.custom is not None:
            self.custom.tracked.output_ids.append(token_id)
        if self.banned is not None:
            self.banned.add(token_id)


def start_slot(state: SlotState, stages: tuple[int, ...], custom: CustomState | None = None) -> Slot:
    """Returns a slot in the state in which it would be if every token of state.output_ids had been drawn here."""
    params = state.params
    window = params.repeat_last_n
    return Slot(
        state=state,
        stages=stages,
        output=TokenCounts(state.output_ids, window) if params.has_output_penalty else None,
        seen=TokenCounts(state.prompt_ids + state.output_ids, window) if params.has_repetition_penalty else None,
        custom=custom,
        banned=Banned(state.banned, state.output_ids) if state.banned else None,
        num_outputs=len(state.output_ids),
        is_plain=params.is_greedy and not stages and custom is None and state.logprobs is None and not state.explain,
    )
