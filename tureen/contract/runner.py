"""The contract between engine and runner. Plain integers, no torch: a plan can be sent to another rank as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from tureen.contract.params import SamplingParams
from tureen.contract.types import Explanation, LogprobSpec, MediaItem, PositionLogprobs
from tureen.errors import TryLater, TureenError
from tureen.grammar import Mask
from tureen.grammar.base import Ending


class SlotState(msgspec.Struct, frozen=True, array_like=True):
    """All that the sampler must know when a sequence takes a slot: at admission, or again after a preemption."""

    slot: int
    params: SamplingParams
    seed: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # not empty when a preempted sequence resumes
    end_token_ids: tuple[int, ...]  # EOS (unless ignored) and stop token ids: not to be drawn before min_new_tokens
    logprobs: LogprobSpec | None = None
    processor: str = ""
    client: str = ""  # who sent the processor, where that is code
    banned: tuple[tuple[int, ...], ...] = ()  # sequences that the output may not have
    explain: bool = False


SPARE_DRAWS = 16
"""A step draws at most this many tokens more than the rows that could run, where rows have guesses. Memory is planned
for the logits of these."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step: `token_ids` at positions start, start + 1, … are computed, and their K/V
    stored."""

    slot: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]  # page table: position p lives in pages[p // page_size] at offset p % page_size
    sample: bool  # draw the token that follows the last of token_ids; with guesses, those that follow each of them too
    adapter: int = 0  # number of the one that its tokens use; 0 = none
    score_from: int = 0  # index into token_ids of the first position that is scored
    score_targets: tuple[int, ...] = ()  # known tokens that follow token_ids[score_from], …: their logprobs are asked
    embeds: bytes = b""  # float32 [k, hidden_size]: the embeddings of those k of token_ids that are NO_TOKEN, in order
    hidden_from: int | None = None  # index into token_ids of the first position whose hidden state is asked for
    num_drafts: int = 0  # of token_ids, the last ones, which guess what will be drawn
    state_from: int = -1  # number of the state before the first token; -1: zeros, or the model has no states
    state_to: int = -1  # number of the state after the last token, another than state_from
    state_saves: tuple[tuple[int, int], ...] = ()  # (n, number): the state after the first n tokens is saved there
    window_from: int = 0  # index of the page that window_pages[0] belongs to
    window_pages: tuple[int, ...] = ()  # page table of layers with a window; empty: they use `pages`
    places: bytes = b""  # int32 [token_ids, 3]: frame, row and column that turn vectors; empty: all three are positions
    pictures: tuple[tuple[int, int], ...] = ()  # positions (start, end) of those that layers see whole, in order

    @property
    def num_known(self) -> int:
        """The number of `token_ids` that are not guesses."""
        return len(self.token_ids) - self.num_drafts


class Masks(Protocol):
    """The tokens that constrained rows may draw. They are computed while the forward pass runs."""

    def wait(self) -> Mapping[int, Sequence[Mask]]:
        """Waits for the masks of the rows that draw a token and have a grammar; returns them by slot.

        A row has one for each token that it may draw. They hold until the next step.
        """

    @property
    def endings(self) -> Mapping[int, Sequence[Ending | None]]:
        """Returns, for rows whose outputs are near their end, what belongs to each of their masks. Waits."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """A step as plain data, which msgpack carries to another process. Live objects, such as masks, are passed beside
    it."""

    rows: tuple[Row, ...]
    new_slots: tuple[SlotState, ...] = ()


class TextToEmbed(NamedTuple):
    """The tokens of a text, or of a pair of texts, whose vector an encoder computes."""

    token_ids: Sequence[int]
    second_start: int = 0  # as in GenerateRequest


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a row failed. `message` is for the client; "" = only the code is known."""

    code: str
    message: str = ""
    status: int = 500
    field: str | None = None
    retry_after_s: int | None = None  # of a status 429 or 503, where it is known

    @classmethod
    def of(cls, error: TureenError) -> RowError:
        """Returns the error of a row as plain data, which can be sent to another process."""
        return cls(
            error.code,
            error.message,
            error.status,
            error.field,
            error.retry_after_s if isinstance(error, TryLater) else None,
        )


NAN_LOGITS = RowError("nan_logits")
NOTHING_TO_DRAW = RowError(
    "grammar_stuck",
    "no token can follow: the constraint and the request's other fields together forbid every token; simplify the "
    "schema, pattern or grammar, or remove fields that forbid tokens",
)
"""No token is left: the grammar, or `SlotState.banned`, forbids them all."""


class RowOutput(msgspec.Struct, frozen=True, array_like=True):
    """The result of the row at the same index. There are no `token_ids` when the row did not sample or failed.

    Tokens are drawn as if there were no guesses, up to the first one that differs from the guess at its place: one, and
    one more for every guess that was right. A row that failed has nothing else, but with NOTHING_TO_DRAW its scores and
    hidden states.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()  # of each drawn token, if its request asked
    scores: tuple[PositionLogprobs, ...] = ()  # one per score target
    hidden_states: tuple[bytes, ...] = ()  # float32 [hidden_size] of token_ids[hidden_from], … to the last
    error: RowError | None = None  # this row alone fails
    explanations: tuple[Explanation, ...] = ()  # of each drawn token, if its request asked


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The results of a step, one for each row of the batch at the same index."""

    rows: tuple[RowOutput, ...]


class Capacity(msgspec.Struct, frozen=True):
    """The bounds of a runner: how many sequences, tokens and pages it can hold."""

    num_pages: int
    page_size: int  # tokens per page
    max_rows: int  # slots; ids 0 .. max_rows - 1
    vocab_size: int
    context_len: int
    hidden_size: int = 1
    kv_bytes_per_token: int = 0
    num_states: int = 0  # of sequences in layers without attention; ids 0 .. num_states - 1
    num_window_pages: int = 0  # pages of layers with a window; 0: all layers share one pool
    window: int = 0  # tokens that a token of these layers sees, itself included
    embedding_size: int = 1  # numbers that a picture's token is given as: hidden_size, or a multiple of it
    takes_guesses: bool = False  # a token's logits do not depend on the number of tokens in its row, to the last bit


KvPart = Literal["page", "window", "state"]
"""The parts of a KV cache that have numbers: its pages, its window pages, its states of layers without attention."""


class KvSizes(NamedTuple):
    """The bytes of a page, a window page and a state; 0: the model has none."""

    page: int
    window: int = 0
    state: int = 0


class PageMemory(Protocol):
    """The bytes of the KV cache's parts, for threads beside the engine's. They hold what a later step needs of them."""

    @property
    def sizes(self) -> KvSizes: ...

    def read(self, part: KvPart, number: int) -> memoryview:
        """Returns a copy of a part; of anything while a step writes to it or the KV cache is away."""

    def write(self, part: KvPart, number: int, data: memoryview) -> None:
        """Writes a part that no step uses. The KV cache must be there."""


class PendingStep(Protocol):
    """A step that was submitted and may still be computed."""

    def result(self) -> StepOutput:
        """Waits for the step; returns its results. Raises what the step raised, at every call."""


class FinishedStep(msgspec.Struct, frozen=True):
    """The pending step of a runner that computes while `submit` is called."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class Runner(Protocol):
    """Executes batches on a device, one after another."""

    def submit(self, batch: Batch, masks: Masks | None = None) -> PendingStep:
        """Begins one forward pass and sampling. `masks`: those of the constrained rows; None = no row is constrained.

        Where the step fails, this or the pending step's `result` raises, and the sampler's state is as it was before.
        The next step is submitted after the last one's result was taken.
        """

    def capacity(self) -> Capacity: ...

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """Yields a picture's embeddings, float32 [num_tokens, hidden_size] as bytes, after a None for each earlier
        piece of work.

        The numbers do not depend on what is done between two pieces.
        """

    def call(self, op: str, **args: Any) -> object:
        """Runs a control operation on every rank. Raises NotFound for an unknown `op`."""

    def close(self) -> None: ...
