"""Sequence: the only mutable state of a request."""

from __future__ import annotations

from tureen.cache.manager import PageTable
from tureen.cache.radix import Namespace
from tureen.engine.hidden import HiddenStateQueue
from tureen.runner.base import Row, RowOutput, SlotState
from tureen.text.detokenizer import Detokenizer
from tureen.types import GenerateRequest, PositionLogprobs, Usage


class Sequence:
    """A request's growing token list. It waits (`table` is None) or runs; changed by Engine and Scheduler only.

    There are no phases: a step computes some of the tokens from `num_computed` on, and where it reaches the last one it
    draws the next. A preempted sequence starts again at 0 with the output it has.
    """

    def __init__(
        self, request: GenerateRequest, number: int, detokenizer: Detokenizer, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.request = request
        self.number = number  # order of arrival
        self.detokenizer = detokenizer
        eos = () if request.params.ignore_eos else eos_token_ids
        self.end_token_ids = frozenset((*eos, *request.params.stop_token_ids))
        self.token_ids = list(request.token_ids)  # prompt, then output
        self.num_prompt = len(request.token_ids)
        self.num_computed = 0
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache when it first ran
        self.slot = -1
        self.table: PageTable | None = None
        self.admission = 0  # order of admission, new with every one
        self.leader: tuple[PageTable, int] | None = None  # waits until this table has published so many pages
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.next_scored = self.num_prompt  # first prompt position whose logits are still asked for
        start = request.logprobs.prompt_start if request.logprobs else -1
        if 0 <= start < self.num_prompt:
            self.prompt_logprobs.append(PositionLogprobs(token=(None, self.token_ids[start])))
            self.next_scored = start
        self.hidden = HiddenStateQueue(request.hidden_states)

    @property
    def namespace(self) -> Namespace:
        return self.request.cache_salt, self.request.adapter

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_tokens(self) -> int:
        return self.num_prompt + self.request.max_new_tokens

    @property
    def is_resuming(self) -> bool:
        """It ran before and was preempted."""
        return self.table is None and self.num_cached is not None

    @property
    def is_following(self) -> bool:
        """It waits for pages that another sequence is computing, and still will publish."""
        if self.leader is None:
            return False
        table, num_pages = self.leader
        return table.is_open and table.is_public and len(table.nodes) < num_pages

    @property
    def max_reused(self) -> int:
        """Most tokens whose K/V may come from the cache: logits are needed from there on."""
        needed = len(self.token_ids) - 1
        if self.next_scored < self.num_prompt - 1:
            needed = min(needed, self.next_scored)
        first_hidden = self.hidden.first_needed()
        return needed if first_hidden is None else min(needed, first_hidden)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_output, self.num_cached or 0)

    def row(self, num_tokens: int) -> Row:
        """This sequence's share of a step: its next `num_tokens` tokens."""
        start = self.num_computed
        end = start + num_tokens
        score_from = max(0, self.next_scored - start)
        targets = self.request.token_ids[start + score_from + 1 : end + 1]
        return Row(
            slot=self.slot,
            token_ids=tuple(self.token_ids[start:end]),
            start=start,
            pages=self.table.as_tuple if self.table else (),
            sample=end == len(self.token_ids) and self.request.max_new_tokens > 0,
            score_from=score_from if targets else 0,
            score_targets=targets,
            embeds=self._embeds(start, end),
            hidden_from=self.hidden.asked_from(start, end, reaches_end=end == len(self.token_ids)),
        )

    def _embeds(self, start: int, end: int) -> bytes:
        if not self.request.embeds:
            return b""
        size = len(self.request.embeds) // self.num_prompt
        return self.request.embeds[start * size : end * size]

    def slot_state(self) -> SlotState:
        """What the sampler must know to start, or to go on after a preemption."""
        return SlotState(
            slot=self.slot,
            params=self.request.params,
            seed=self.request.seed,
            prompt_ids=self.request.token_ids,
            output_ids=tuple(self.token_ids[self.num_prompt :]),
            end_token_ids=tuple(sorted(self.end_token_ids)),
            logprobs=self.request.logprobs,
            processor=self.request.processor,
        )

    def advance(self, row: Row, output: RowOutput) -> None:
        """Take over what a step computed, except the drawn token."""
        self.num_computed += len(row.token_ids)
        if row.score_targets:
            self.prompt_logprobs += output.prompt_logprobs
            self.next_scored += len(row.score_targets)
        if row.hidden_from is not None:
            self.hidden.add(output.hidden_states, self.num_computed)

    def take_prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """All of them, once; nothing before all are there."""
        if self.next_scored < self.num_prompt - 1:
            return ()
        taken = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        return taken
