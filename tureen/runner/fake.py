"""A deterministic runner without a model, for tests and for measuring everything but the model.

It stores, for each position, a hash chained to what it reads back through the page table, and draws tokens from a hash
of all that it reads: a page that is shared wrongly, stale or freed changes the output.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Literal

from tureen.contract.runner import (
    NAN_LOGITS,
    NOTHING_TO_DRAW,
    Batch,
    Capacity,
    FinishedStep,
    KvPart,
    KvSizes,
    Masks,
    PendingStep,
    Row,
    RowOutput,
    SlotState,
    StepOutput,
)
from tureen.contract.types import NO_TOKEN, Explanation, LogprobSpec, MediaItem, PositionLogprobs, TokenLogprob
from tureen.errors import InvalidRequest, NotFound
from tureen.grammar import Mask

WIDTH = 8  # bytes stored per position
POISON = b"\xff" * WIDTH  # stands for NaN: whatever is computed from it is poison too

Fault = Literal["raise", "poison"]


def digest(*parts: bytes | int) -> bytes:
    """Returns the hash that everything here is made of. Integers count as 8 bytes, little-endian, signed."""
    state = blake2b(digest_size=WIDTH)
    for part in parts:
        state.update(part if isinstance(part, bytes) else part.to_bytes(WIDTH, "little", signed=True))
    return state.digest()


def number(data: bytes) -> int:
    """Returns a digest as an integer, little-endian."""
    return int.from_bytes(data, "little")


def _allows(mask: Mask | None, token_id: int) -> bool:
    return mask is None or bool(mask[token_id // 32] >> (token_id % 32) & 1)


def _is_right(row: Row, drawn: list[int]) -> bool:
    """Says whether the last token that was drawn had been guessed."""
    place = len(drawn) - 1
    return place < row.num_drafts and drawn[place] == row.token_ids[row.num_known + place]


def logprob(data: bytes, token_id: int) -> float:
    """Returns a finite log-probability in [-10, 0) for a token after the history hashed in `data`."""
    return -(number(digest(data, token_id)) % 9999 + 1) / 1000


class FakePages:
    """Stores bytes at the positions of rows. A row with window pages has them there too."""

    def __init__(self, capacity: Capacity) -> None:
        self.page_bytes = capacity.page_size * WIDTH
        self._capacity = capacity
        self._kv = self._window_kv = bytearray()
        self.clear()

    def clear(self, *, is_there: bool = True) -> None:
        """Makes all bytes 0, or takes the memory away."""
        self._kv = bytearray(is_there * self._capacity.num_pages * self.page_bytes)
        self._window_kv = bytearray(is_there * self._capacity.num_window_pages * self.page_bytes)

    def page(self, page: int, *, in_window: bool = False) -> bytes:
        return bytes((self._window_kv if in_window else self._kv)[self._page(page)])

    def write(self, page: int, data: bytes | memoryview, *, in_window: bool = False) -> None:
        (self._window_kv if in_window else self._kv)[self._page(page)] = data

    def poison(self, page: int) -> None:
        """Fills a page with NaN."""
        self._kv[self._page(page)] = POISON * self._capacity.page_size

    def poison_window(self, page: int) -> None:
        """Fills a window page with NaN."""
        self._window_kv[self._page(page)] = POISON * self._capacity.page_size

    def store(self, row: Row, position: int, value: bytes) -> None:
        self._kv[self._at(row, position)] = value
        if row.window_pages:
            self._window_kv[self._in_window(row, position)] = value

    def read(self, row: Row, position: int) -> bytes:
        return bytes(self._kv[self._at(row, position)])

    def up_to(self, row: Row, position: int) -> bytes:
        """Returns all that is stored from the row's first token to `position`."""
        num_full, rest = divmod(position + 1, self._capacity.page_size)
        pages = [self.page(page) for page in row.pages[:num_full]]
        if rest:
            pages.append(self.page(row.pages[num_full])[: rest * WIDTH])
        return b"".join(pages)

    def has_clean_window(self, row: Row) -> bool:
        """Returns whether the window pages that the row's first token sees have no poison. Raises RuntimeError if one
        has another token's bytes."""
        is_clean = True
        first = max(0, row.start + 1 - self._capacity.window) if row.window_pages else row.start
        for position in range(first, row.start):
            stored = self._window_kv[self._in_window(row, position)]
            is_clean = is_clean and stored != POISON
            if stored not in (POISON, self.read(row, position)):
                raise RuntimeError(f"the window page of position {position} holds another token")
        return is_clean

    def _page(self, page: int) -> slice:
        return slice(page * self.page_bytes, (page + 1) * self.page_bytes)

    def _at(self, row: Row, position: int) -> slice:
        page, offset = divmod(position, self._capacity.page_size)
        return _place(row.pages[page] * self.page_bytes, offset)

    def _in_window(self, row: Row, position: int) -> slice:
        page, offset = divmod(position, self._capacity.page_size)
        index = page - row.window_from
        if not 0 <= index < len(row.window_pages):
            raise RuntimeError(f"the row has no window page of position {position}")
        return _place(row.window_pages[index] * self.page_bytes, offset)


def _place(page_start: int, offset: int) -> slice:
    start = page_start + offset * WIDTH
    return slice(start, start + WIDTH)


class FakeRunner:
    """A Runner that computes hashes in place of a model, over `capacity`. Options:

    `fault(call, row)`: "raise" raises before anything is done; "poison" makes the row's K/V NaN. Calls count from 0.
    `choose(token, state, output_ids)`: replaces the drawn token, to script an output.
    `step_s`, `token_s`: seconds a step takes, and each of its tokens.
    `thread`: steps are computed there, after `submit` has returned.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        fault: Callable[[int, Row], Fault | None] | None = None,
        choose: Callable[[int, SlotState, list[int]], int] | None = None,
        step_s: float = 0.0,
        token_s: float = 0.0,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        self.num_calls = 0
        self.num_tokens = 0  # computed, over all calls
        self._capacity = capacity
        self._fault = fault
        self._choose = choose
        self._step_s = step_s
        self._token_s = token_s
        self._thread = thread
        self._weights = 0  # their number; all that is stored depends on them
        self.pages = FakePages(capacity)
        self._recurrent: dict[int, bytes] = {}  # by number: the states of layers without attention
        self._states: dict[int, SlotState] = {}
        self._seeds: dict[int, int] = {}  # by slot
        self._outputs: dict[int, list[int]] = {}  # by slot: the sampler's own record of what it drew

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, batch: Batch, masks: Masks | None = None) -> PendingStep:
        if self._thread is not None:
            return self._thread.submit(self.run, batch, masks)
        return FinishedStep(self.run(batch, masks))

    def run(self, batch: Batch, masks: Masks | None = None) -> StepOutput:
        call = self.num_calls
        self.num_calls += 1
        faults = [self._fault(call, row) if self._fault else None for row in batch.rows]
        if "raise" in faults:
            raise RuntimeError(f"scripted fault in call {call}")
        num_tokens = sum(len(row.token_ids) for row in batch.rows)
        self.num_tokens += num_tokens
        if self._step_s or self._token_s:
            time.sleep(self._step_s + self._token_s * num_tokens)
        for state in batch.new_slots:
            self._states[state.slot] = state
            self._seeds[state.slot] = 0 if state.params.is_greedy else state.seed
            self._outputs[state.slot] = list(state.output_ids)
        allowed: Mapping[int, Sequence[Mask]] = masks.wait() if masks else {}
        rows = zip(batch.rows, faults, strict=True)
        return StepOutput(tuple(self._run_row(row, fault, allowed.get(row.slot, ())) for row, fault in rows))

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """Yields None once for each token of the picture, then small numbers that depend on the picture and on the
        token's place in it."""
        embeddings = b""
        for index in range(item.num_rows):
            yield None
            numbers, count = digest(item.digest.encode(), index), self._capacity.hidden_size
            embeddings += struct.pack(f"<{count}f", *(numbers[i % WIDTH] for i in range(count)))
        yield embeddings

    def call(self, op: str, **args: object) -> object:
        if op == "device":
            return {"name": "fake", "dtype": "none", "activations": ""}
        if op in ("load_adapter", "unload_adapter"):
            return None
        if op == "page_memory":
            return self
        if op == "kv_facts":
            return {"load": self._weights, "files": [], "libraries": [], "facts": {"weights": self._weights}}
        if op == "update_weights":
            self._weights = args["number"]  # type: ignore[assignment]
            return None
        if op in ("start_profile", "stop_profile"):
            return "fake.trace.json"
        if op in ("start_expert_record", "stop_expert_record", "take_expert_record"):
            raise InvalidRequest("the model has no experts, so there is nothing to count", code="no_experts")
        if op in ("release_memory", "resume_memory"):
            self.pages.clear(is_there=op == "resume_memory")
            return None
        if op == "forget":
            self.pages.clear()
            return None
        raise NotFound(f"unknown operation '{op}'")

    @property
    def sizes(self) -> KvSizes:
        """The bytes of the parts of the KV cache: the runner is the PageMemory of its own."""
        capacity, page_bytes = self._capacity, self.pages.page_bytes
        return KvSizes(page_bytes, page_bytes * (capacity.num_window_pages > 0), WIDTH * (capacity.num_states > 0))

    def read(self, part: KvPart, number: int) -> memoryview:
        if part == "state":
            return memoryview(self._recurrent.get(number, POISON))
        return memoryview(self.pages.page(number, in_window=part == "window"))

    def write(self, part: KvPart, number: int, data: memoryview) -> None:
        if part == "state":
            self._recurrent[number] = bytes(data)
        else:
            self.pages.write(number, data, in_window=part == "window")

    def close(self) -> None:
        self._states.clear()

    def _run_row(self, row: Row, fault: Fault | None, masks: Sequence[Mask]) -> RowOutput:
        self._store(row, fault)
        hidden = self._hidden_states(row)
        if hidden is None:
            return RowOutput(error=NAN_LOGITS)
        state = self._states.get(row.slot)
        spec = None if state is None else state.logprobs
        scores = []
        for index, target in enumerate(row.score_targets):
            history = self._history(row, row.start + row.score_from + index)
            if history is None:
                return RowOutput(error=NAN_LOGITS)
            scores.append(self._logprobs(history, target, spec or LogprobSpec()))
        self._hear_of(row)
        if not row.sample:
            return RowOutput(scores=tuple(scores), hidden_states=hidden)
        token_ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        while not token_ids or _is_right(row, token_ids):
            history = self._history(row, row.start + row.num_known - 1 + len(token_ids))
            drawn = None if history is None else self._draw(row, history, masks[len(token_ids)] if masks else None)
            if history is None or drawn is None:
                break
            token_ids.append(drawn)
            if spec:
                logprobs.append(self._logprobs(history, drawn, spec))
        if not token_ids and history is None:
            return RowOutput(error=NAN_LOGITS)
        error = None if token_ids else NOTHING_TO_DRAW
        return RowOutput(tuple(token_ids), tuple(logprobs), tuple(scores), hidden, error, self._explain(row, token_ids))

    def _store(self, row: Row, fault: Fault | None) -> None:
        """Stores K/V and states of the row's tokens."""
        before = self._before(row) if self.pages.has_clean_window(row) else POISON
        for index, token_id in enumerate(row.token_ids):
            if fault == "poison" or before == POISON:
                before = POISON
            else:
                before = digest(before, token_id + ((row.adapter + self._weights) << 32), self._embed(row, index))
            self.pages.store(row, row.start + index, before)
            self._keep_state(row, index + 1, before)

    def _before(self, row: Row) -> bytes:
        """Returns what all tokens before the row's come to: from their page, or from the state of a model with
        states."""
        if not row.start:
            return b""
        return self._recurrent[row.state_from] if self._capacity.num_states else self.pages.read(row, row.start - 1)

    def _keep_state(self, row: Row, num_tokens: int, state: bytes) -> None:
        """Keeps the state after the first `num_tokens` tokens of the row where the row wants it."""
        if self._capacity.num_states:
            numbers = [number for count, number in row.state_saves if count == num_tokens]
            for number in (*numbers, row.state_to) if num_tokens == len(row.token_ids) else numbers:
                self._recurrent[number] = state

    def _hidden_states(self, row: Row) -> tuple[bytes, ...] | None:
        """Returns small numbers that depend on all tokens before; None where there is poison among these."""
        if row.hidden_from is None:
            return ()
        count = self._capacity.hidden_size
        states: list[bytes] = []
        for position in range(row.start + row.hidden_from, row.start + len(row.token_ids)):
            history = self._history(row, position)
            if history is None:
                return None
            states.append(struct.pack(f"<{count}f", *(history[i % WIDTH] for i in range(count))))
        return tuple(states)

    def _embed(self, row: Row, index: int) -> bytes:
        """Returns the embedding given in place of the token at an index of the row; nothing where there is a token."""
        if row.token_ids[index] != NO_TOKEN:
            return b""
        size = 4 * self._capacity.hidden_size
        rank = row.token_ids[:index].count(NO_TOKEN)
        return row.embeds[rank * size : (rank + 1) * size]

    def _hear_of(self, row: Row) -> None:
        """Takes output tokens of the row that were not drawn here."""
        state = self._states.get(row.slot)
        if state is not None:
            outputs = self._outputs[row.slot]
            outputs += row.token_ids[max(0, len(state.prompt_ids) + len(outputs) - row.start) : row.num_known]

    def _draw(self, row: Row, history: bytes, mask: Mask | None) -> int | None:
        state, outputs = self._states[row.slot], self._outputs[row.slot]
        size = self._capacity.vocab_size
        token_id = number(digest(history, self._seeds[row.slot], *outputs[-4:], len(outputs))) % size
        if self._choose is not None:
            token_id = self._choose(token_id, state, outputs)
        banned = state.end_token_ids if len(outputs) < state.params.min_new_tokens else ()
        after = ((token_id + step) % size if step else token_id for step in range(size))
        allowed = next((candidate for candidate in after if candidate not in banned and _allows(mask, candidate)), None)
        if allowed is not None:
            outputs.append(allowed)
        return allowed

    def _explain(self, row: Row, token_ids: Sequence[int]) -> tuple[Explanation, ...]:
        """Returns explanations of drawn tokens without candidates, if the row's request asks for them."""
        state = self._states.get(row.slot)
        if state is None or not state.explain:
            return ()
        places = enumerate(token_ids, row.start + row.num_known)
        return tuple(Explanation(token_id=token, position=place, chosen_by="best") for place, token in places)

    def _history(self, row: Row, position: int) -> bytes | None:
        """Returns the hash of all that is stored up to `position`; None when there is poison in it."""
        stored = self.pages.up_to(row, position)
        return None if POISON in stored else digest(stored)

    def _logprobs(self, history: bytes, token_id: int, spec: LogprobSpec) -> PositionLogprobs:
        def entry(token: int) -> TokenLogprob:
            return logprob(history, token), token

        start = number(history) % self._capacity.vocab_size
        near = [(start + step) % self._capacity.vocab_size for step in range(spec.top)]
        return PositionLogprobs(
            token=entry(token_id),
            top=tuple(sorted(map(entry, near), reverse=True)) if spec.top else None,
            token_ids=tuple(map(entry, spec.token_ids)) if spec.token_ids else None,
        )
