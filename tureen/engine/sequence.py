"""Sequence: the only mutable state of a request."""

from __future__ import annotations

from typing import NamedTuple

from tureen.cache.manager import PageTable
from tureen.cache.radix import Namespace
from tureen.contract.runner import Row, RowOutput, SlotState
from tureen.contract.types import FinishReason, GenerateRequest, Usage
from tureen.engine.constraint import Constraint
from tureen.engine.embedded import Embedded, without_digests
from tureen.engine.hidden import HiddenStateQueue
from tureen.engine.scores import ScoreQueue
from tureen.text.detokenizer import Detokenizer


class SequenceTerms(NamedTuple):
    """The settings of a sequence that are fixed when it comes."""

    number: int  # order of arrival
    num_prompt: int
    max_tokens: int  # prompt and output
    end_token_ids: frozenset[int]
    is_plain: bool  # nothing comes out but tokens and text
    adapter: int  # its number; 0 = none


class Sequence:
    """A request's growing token list. It waits (`table` is None) or runs; changed by Engine and Scheduler only.

    There are no phases: a step computes some of the tokens from `num_computed` on, and where it reaches the last one it
    draws the next. A preempted sequence starts again at 0 with the output it has. Tokens that its grammar forces are
    appended without being drawn; the next step computes them together.
    """

    def __init__(
        self,
        request: GenerateRequest,
        number: int,
        detokenizer: Detokenizer,
        eos_token_ids: tuple[int, ...],
        adapter: int = 0,
    ) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.terms = _terms(request, number, eos_token_ids, adapter)
        self.embedded = Embedded(request) if request.embeds or request.media else None
        self.token_ids = list(request.token_ids)  # prompt, then output
        self.num_computed = 0
        # prompt tokens found in the prefix cache when it first ran, here or in another engine
        self.num_cached = request.resumed_cached if request.resumed else None
        self.slot = -1
        self.table: PageTable | None = None
        self.admission = 0  # order of admission, new with every one
        self.leader: tuple[PageTable, int] | None = None  # waits until this table has published so many pages
        self.constraint: Constraint | None = None  # there once its grammar is compiled
        self.ended: FinishReason | None = None  # the output is complete, but maybe not all of it is computed
        self.scores = ScoreQueue(request.logprobs, request.token_ids, len(request.resumed))
        self.hidden = HiddenStateQueue(request.hidden_states, len(request.token_ids), request.resumed_states)

    @property
    def namespace(self) -> Namespace:
        return self.request.cache_salt, str(self.terms.adapter) if self.terms.adapter else ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.terms.num_prompt

    @property
    def num_left(self) -> int:
        """How many more tokens its output may have."""
        return self.terms.max_tokens - len(self.token_ids)

    @property
    def is_resuming(self) -> bool:
        """It ran before and was preempted, here or in another engine."""
        return self.table is None and self.num_cached is not None

    @property
    def is_following(self) -> bool:
        """It waits for pages that another sequence is computing, and still will publish."""
        if self.leader is None:
            return False
        table, num_pages = self.leader
        return table.is_open and table.is_public and len(table.nodes) < num_pages

    @property
    def is_accepted(self) -> bool:
        """It has a grammar, and its output may end here."""
        return self.constraint is not None and self.constraint.is_accepting

    @property
    def num_needed(self) -> int:
        """How many tokens must be computed: of a complete output all but the last, which nothing follows."""
        return len(self.token_ids) - 1 if self.ended and self.num_output else len(self.token_ids)

    @property
    def needs_run(self) -> bool:
        """Something is still to be drawn, scored or returned."""
        if self.ended is None:
            return True
        is_asked = self.scores.first_needed is not None or self.hidden.is_wanted
        return is_asked and self.num_computed < self.num_needed

    @property
    def max_reused(self) -> int:
        """Most tokens whose K/V may come from the cache: logits are needed from there on."""
        firsts = (self.num_needed - 1, self.scores.first_needed, self.hidden.first_needed())
        return min(first for first in firsts if first is not None)

    @property
    def num_forced(self) -> int:
        """Output tokens that nobody drew."""
        return self.constraint.num_forced if self.constraint else 0

    @property
    def text_end(self) -> int | None:
        """The end of the text of the tokens that were sent, if others wait for their log-probabilities."""
        num_sent = self.scores.num_sent
        if not self.scores.is_wanted or num_sent == self.num_output:
            return None
        return self.scores.text_ends[num_sent - 1] if num_sent else 0

    @property
    def usage(self) -> Usage:
        """The token counts of the output that is, or may be, sent: forced tokens that wait for their log-probabilities
        do not count."""
        num_output, num_held = len(self.token_ids) - self.terms.num_prompt, 0
        if self.scores.is_wanted:
            num_held = num_output - self.scores.num_sent
        num_forced = 0 if self.constraint is None else max(0, self.constraint.num_forced - num_held)
        return Usage(self.terms.num_prompt, num_output - num_held, self.num_cached or 0, num_forced)

    def takes_guesses(self, row: Row) -> bool:
        """Whether guesses may follow the row's tokens: it samples, and nothing else is asked of it."""
        return row.sample and not (row.embeds or row.score_targets or row.hidden_from is not None)

    def row(self, num_tokens: int, guesses: tuple[int, ...] = ()) -> Row:
        """This sequence's share of a step: its next `num_tokens` tokens, and guesses of those that follow."""
        start = self.num_computed
        end = start + num_tokens
        token_ids = (*self.token_ids[start:end], *guesses)
        pages = self.table.as_tuple if self.table else ()
        samples = end == len(self.token_ids) < self.terms.max_tokens and self.ended is None
        embeds = b""
        if self.embedded is not None and start < self.embedded.end:
            token_ids, embeds = without_digests(token_ids), self.embedded.between(start, end)
        if self.terms.is_plain and not embeds:
            return Row(self.slot, token_ids, start, pages, samples, self.terms.adapter, num_drafts=len(guesses))
        score_from, score_targets = self.scores.targets(self.token_ids, start, end)
        return Row(
            slot=self.slot,
            token_ids=token_ids,
            start=start,
            pages=pages,
            sample=samples,
            adapter=self.terms.adapter,
            score_from=score_from,
            score_targets=score_targets,
            embeds=embeds,
            hidden_from=self.hidden.asked_from(start, end, reaches_end=end == self.num_needed),
            num_drafts=len(guesses),
        )

    def slot_state(self) -> SlotState:
        """Returns all that the sampler needs to start, or to go on after a preemption."""
        return SlotState(
            slot=self.slot,
            params=self.request.params,
            seed=self.request.seed,
            prompt_ids=self.request.token_ids if self.embedded is None else without_digests(self.request.token_ids),
            output_ids=tuple(self.token_ids[self.terms.num_prompt :]),
            end_token_ids=tuple(sorted(self.terms.end_token_ids)),
            logprobs=self.request.logprobs,
            processor=self.request.processor,
            client=self.request.client,
        )

    def append(self, token_id: int, *, is_drawn: bool) -> None:
        """One more output token."""
        if not is_drawn:
            self.scores.ask(len(self.token_ids))
        if self.scores.is_wanted or self.request.resumed:
            self.scores.text_ends.append(self.detokenizer.length)
        self.token_ids.append(token_id)

    def start_again(self) -> bool:
        """Another model computes it from its first token on. False where it was sent what the first one computed of
        its prompt."""
        return self.scores.start_again() and self.hidden.start_again()

    def advance(self, row: Row, output: RowOutput) -> None:
        """Take over what a step computed, except the drawn token."""
        self.num_computed += row.num_known
        if row.score_targets:
            self.scores.add(output.scores)
        if row.hidden_from is not None:
            self.hidden.add(output.hidden_states, self.num_computed)


def _terms(request: GenerateRequest, number: int, eos_token_ids: tuple[int, ...], adapter: int) -> SequenceTerms:
    ignores_eos = request.params.ignore_eos and request.grammar is None
    return SequenceTerms(
        number=number,
        num_prompt=len(request.token_ids),
        max_tokens=len(request.token_ids) + request.max_new_tokens,
        end_token_ids=frozenset((*(() if ignores_eos else eos_token_ids), *request.params.stop_token_ids)),
        is_plain=request.logprobs is None and request.hidden_states == "none",
        adapter=adapter,
    )
