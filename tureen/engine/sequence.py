"""The state of a running request: `Sequence` is its only mutable object."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tureen.cache.manager import PageTable
from tureen.cache.radix import Namespace
from tureen.contract.params import repetition_bounds
from tureen.contract.runner import Row, RowOutput, SlotState
from tureen.contract.types import Explanation, FinishReason, GenerateRequest, Usage
from tureen.engine.constraint import Constraint
from tureen.engine.embedded import Embedded, without_digests
from tureen.engine.hidden import HiddenStateQueue
from tureen.engine.repetition import Repetition
from tureen.engine.scores import ScoreQueue
from tureen.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from tureen.engine.times import RequestTimes

NO_PICTURES: tuple[tuple[int, int], ...] = ()


class SequenceTerms(NamedTuple):
    """The settings of a sequence that are fixed when it arrives."""

    number: int  # order of arrival
    num_prompt: int
    max_tokens: int  # prompt and output
    end_token_ids: frozenset[int]
    is_plain: bool  # the request wants only tokens and text
    adapter: int  # its number; 0 = none


class Asked(NamedTuple):
    """Queues of the outputs that a request wants in addition to tokens and text, and how it ends; None if not
    wanted."""

    scores: ScoreQueue | None
    hidden: HiddenStateQueue | None
    explanations: list[Explanation] | None  # of the output tokens that were not sent
    times: RequestTimes | None
    repetition: Repetition | None  # ends the output


class SentOutput:
    """The amount of an output that its client has."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.text_ends: list[int] = []  # end of the text of each output token, while it may be needed


class SequenceCounts:
    """Counts of a sequence for its client's usage."""

    def __init__(self, cached: int) -> None:
        self.cached = cached  # prompt tokens that the prefix cache had when it first ran
        self.loaded = 0  # of these, loaded from outside the KV cache
        self.preemptions = 0
        self.guessed = 0  # tokens that were guessed before they were drawn; of those ...
        self.guessed_right = 0  # ... the ones that were then drawn


class Sequence:
    """A request's growing token list. It waits (`table` is None) or runs; changed by Engine and Scheduler only.

    There are no phases: a step computes some tokens from `num_computed` on, and draws the next token if it reaches the
    last one. A preempted sequence starts again at 0 with its output so far. Tokens that its grammar forces are appended
    without being drawn; the next step computes them together.
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
        self.has_begun = bool(request.resumed)  # it runs, or ran earlier, here or in another engine
        self.counts = SequenceCounts(request.resumed_cached)
        self.slot = -1
        self.table: PageTable | None = None
        self.leader: tuple[PageTable, int] | None = None  # waits until this table has published this number of pages
        self.constraint: Constraint | None = None  # set when its grammar is compiled
        self.ended: FinishReason | None = None  # the output is complete, but may not be fully computed
        self.sent = SentOutput(len(request.resumed))
        self.asked = _asked(request)

    @property
    def namespace(self) -> Namespace:
        """The salt and the adapter. Only sequences with the same ones share prefixes."""
        return self.request.cache_salt, str(self.terms.adapter) if self.terms.adapter else ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.token_ids) - self.terms.num_prompt

    @property
    def num_left(self) -> int:
        """The number of further tokens that its output may have."""
        return self.terms.max_tokens - len(self.token_ids)

    @property
    def is_following(self) -> bool:
        """Returns whether the sequence waits for pages that a running one computes and will publish."""
        if self.leader is None:
            return False
        table, num_pages = self.leader
        return table.is_open and table.is_public and len(table.nodes) < num_pages

    @property
    def is_accepted(self) -> bool:
        """Returns whether the sequence has a grammar and its output may end here."""
        return self.constraint is not None and self.constraint.is_accepting

    @property
    def num_needed(self) -> int:
        """The number of tokens that must be computed: all except the last token of a complete output."""
        return len(self.token_ids) - 1 if self.ended and self.num_output else len(self.token_ids)

    @property
    def needs_run(self) -> bool:
        """Returns whether something is still to be drawn, scored or returned."""
        if self.ended is None:
            return True
        has_scores = self.asked.scores is not None and self.asked.scores.first_needed is not None
        return (has_scores or self.asked.hidden is not None) and self.num_computed < self.num_needed

    @property
    def max_reused(self) -> int:
        """Maximum number of tokens whose K/V may come from the cache; logits are needed from there on."""
        firsts = [self.num_needed - 1]
        if self.asked.scores is not None and self.asked.scores.first_needed is not None:
            firsts.append(self.asked.scores.first_needed)
        if self.asked.hidden is not None and (first := self.asked.hidden.first_needed()) is not None:
            firsts.append(first)
        return min(firsts)

    @property
    def num_forced(self) -> int:
        """The number of output tokens that the grammar forced."""
        return self.constraint.num_forced if self.constraint else 0

    @property
    def text_end(self) -> int | None:
        """The end of the text of the sent tokens, if others wait for their log-probabilities; else None."""
        if self.asked.scores is None or self.sent.num_tokens == self.num_output:
            return None
        return self.sent.text_ends[self.sent.num_tokens - 1] if self.sent.num_tokens else 0

    @property
    def usage(self) -> Usage:
        """Returns the token counts of the output that was or may be sent. Forced tokens that wait for their
        log-probabilities do not count."""
        num_output, num_held = len(self.token_ids) - self.terms.num_prompt, 0
        if self.asked.scores is not None:
            num_held = num_output - self.sent.num_tokens
        num_forced = 0 if self.constraint is None else max(0, self.constraint.num_forced - num_held)
        return Usage(
            self.terms.num_prompt,
            num_output - num_held,
            self.counts.cached,
            num_forced,
            min(self.counts.loaded, self.counts.cached),
            self.counts.preemptions,
            self.counts.guessed,
            self.counts.guessed_right,
        )

    def step_tokens(self, start: int, budget: int) -> int:
        """Returns the number of tokens that a step computes from position `start` on: at most `budget`, or a whole
        picture."""
        end = min(start + budget, self.num_needed)
        return (end if self.embedded is None else self.embedded.step_end(start, end)) - start

    def takes_guesses(self, row: Row) -> bool:
        """Returns whether guesses may follow the row's tokens: it samples, and returns nothing but tokens."""
        return row.sample and not (row.embeds or row.score_targets or row.hidden_from is not None)

    def row(self, num_tokens: int, guesses: tuple[int, ...] = ()) -> Row:
        """Returns this sequence's share of a step: its next `num_tokens` tokens, and guesses of those that follow."""
        start = self.num_computed
        end = start + num_tokens
        token_ids, embeds, places, pictures = (*self.token_ids[start:end], *guesses), b"", b"", NO_PICTURES
        pages = self.table.pages if self.table else ()
        live = self.table.live if self.table else None
        window_from, window_pages = (live.first, live.pages) if live else (0, ())
        samples = end == len(self.token_ids) < self.terms.max_tokens and self.ended is None
        if self.embedded is not None:
            places, pictures = self.embedded.places(start, end + len(guesses)), self.embedded.pictures(start, end)
            token_ids, embeds = without_digests(token_ids), self.embedded.between(start, end)
        if self.terms.is_plain and not embeds:
            return Row(
                self.slot,
                token_ids,
                start,
                pages,
                samples,
                self.terms.adapter,
                num_drafts=len(guesses),
                window_from=window_from,
                window_pages=window_pages,
                places=places,
            )
        if self.asked.times is not None:
            self.asked.times.begin_step()
        score_from, score_targets = 0, tuple[int, ...]()
        if self.asked.scores is not None:
            score_from, score_targets = self.asked.scores.targets(self.token_ids, start, end)
        hidden_from = None
        if self.asked.hidden is not None:
            hidden_from = self.asked.hidden.asked_from(start, end, reaches_end=end == self.num_needed)
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
            hidden_from=hidden_from,
            num_drafts=len(guesses),
            window_from=window_from,
            window_pages=window_pages,
            places=places,
            pictures=pictures,
        )

    def slot_state(self) -> SlotState:
        """Returns the state that the sampler needs to start, or to continue after a preemption."""
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
            banned=() if self.request.banned is None else self.request.banned.sequences,
            explain=self.request.explain,
        )

    def note_drawn(self, output: RowOutput, index: int) -> None:
        """Takes the requested outputs about the drawn token at `index`, before it is appended."""
        if self.asked.scores is not None and output.logprobs:
            self.asked.scores.add_drawn(output.logprobs[index])
        if self.asked.explanations is not None:
            self.asked.explanations.append(output.explanations[index])

    def append(self, token_id: int, *, is_drawn: bool) -> None:
        """Appends one output token."""
        if self.asked.scores is not None and not is_drawn and self.num_output >= self.sent.num_tokens:
            self.asked.scores.ask(len(self.token_ids))
        if self.asked.explanations is not None and not is_drawn and self.num_output >= self.sent.num_tokens:
            position = len(self.token_ids)
            self.asked.explanations.append(Explanation(token_id=token_id, position=position, chosen_by="grammar"))
        if self.asked.scores is not None or self.request.resumed:
            self.sent.text_ends.append(self.detokenizer.length)
        self.token_ids.append(token_id)

    def start_again(self) -> bool:
        """Recomputes the sequence from its first token, because the weights have changed.

        Returns False if its client already has something that the old weights computed from its prompt.
        """
        return all(queue.start_again() for queue in (self.asked.scores, self.asked.hidden) if queue is not None)

    def take_right_guesses(self, num_right: int, num_appended: int) -> None:
        """Records right guesses as computed; those after the output's end do not count."""
        self.num_computed = min(self.num_computed + num_right, self.num_needed)
        self.counts.guessed_right += num_appended

    def advance(self, row: Row, output: RowOutput) -> None:
        """Records the results of a step, except the drawn tokens."""
        self.num_computed += row.num_known
        if self.asked.times is not None:
            self.asked.times.end_step(row.num_known, has_drawn=row.sample)
        if self.asked.scores is not None and row.score_targets:
            self.asked.scores.add(output.scores)
        if self.asked.hidden is not None and row.hidden_from is not None:
            self.asked.hidden.add(output.hidden_states, self.num_computed)


def _asked(request: GenerateRequest) -> Asked:
    num_prompt, num_sent = len(request.token_ids), len(request.resumed)
    scores, hidden = None, None
    if request.logprobs is not None:
        scores = ScoreQueue(request.logprobs, request.token_ids, num_sent)
    if request.hidden_states != "none":
        hidden = HiddenStateQueue(request.hidden_states, num_prompt, request.resumed_states)
    bounds = repetition_bounds(request.params) if request.params.repetition_detection else None
    repetition = None if bounds is None else Repetition(*bounds)
    return Asked(scores, hidden, [] if request.explain else None, _times() if request.timed else None, repetition)


def _times() -> RequestTimes:
    from tureen.engine.times import RequestTimes  # noqa: PLC0415 - few requests are traced

    return RequestTimes()


def _terms(request: GenerateRequest, number: int, eos_token_ids: tuple[int, ...], adapter: int) -> SequenceTerms:
    ignores_eos = request.params.ignore_eos and request.grammar is None
    return SequenceTerms(
        number=number,
        num_prompt=len(request.token_ids),
        max_tokens=len(request.token_ids) + request.max_new_tokens,
        end_token_ids=frozenset((*(() if ignores_eos else eos_token_ids), *request.params.stop_token_ids)),
        is_plain=request.logprobs is None
        and request.hidden_states == "none"
        and not (request.explain or request.timed),
        adapter=adapter,
    )
