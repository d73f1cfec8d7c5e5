"""Decides which sequences run in a step, and with how many tokens: admits, advances and preempts them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from tureen.cache.manager import CacheManager, PageTable
from tureen.cache.radix import RadixNode
from tureen.contract.runner import SPARE_DRAWS, Row, SlotState
from tureen.engine.queue import WaitingQueue
from tureen.engine.sequence import Sequence
from tureen.engine.states import StateKeeper
from tureen.errors import TureenError

RESUME_HEADROOM = 64
"""Number of tokens for which every running sequence must have pages before a preempted one is admitted again."""


Drafter = Callable[[Sequence, int, int], tuple[int, ...]]
"""A function that guesses the next tokens of a sequence: at most the first number, in a step in which the second number
of rows draw. Guesses change no output, only the speed."""
Grow = Callable[[Sequence, int], bool]
"""A function that takes pages for that many more tokens of a sequence. Returns False if too few are available."""
BatchDrafter = Callable[[list[Sequence], int, int, Grow], list[tuple[int, ...]]]
"""A function that guesses for several sequences at once: at most the first number of tokens of all, in a step in which
the second number of rows draw. It takes the pages for its guesses."""
MOST_KNOWN = 16
"""Maximum known tokens of a row for which a draft model guesses. The first token after a prompt is not delayed."""


class Drafters(NamedTuple):
    """The functions that guess tokens."""

    each: Drafter
    batch: BatchDrafter | None = None  # asked first


class StepPlan(NamedTuple):
    """A step's sequences, the row of each at the same index, and the states of newly taken slots."""

    sequences: list[Sequence]
    rows: list[Row]
    new_slots: list[SlotState]


class Scheduler:
    """Hands out a step's token budget: running sequences first, in order of admission, then waiting ones.

    A step computes a picture that layers see whole at once, even if it exceeds the budget.

    Sequences that run when idle get only the steps in which no other can run, and give up slots and pages to others.

    Tokens (the budget), slots and pages limit a sequence. It takes pages for all its known tokens at admission, and one
    more at each page boundary. If no page is free and none can be evicted, the last running sequence is preempted. The
    first one is never preempted unless it is alone, and every sequence fits alone. So the engine always progresses.
    """

    def __init__(
        self,
        cache: CacheManager,
        queue: WaitingQueue,
        *,
        max_rows: int,
        token_budget: int,
        by_priority: bool,
    ) -> None:
        self.queue = queue
        self.running: list[Sequence] = []
        self.is_held = False  # no new sequence begins; running ones continue
        self.num_preemptions = 0
        self.num_guesses = 0  # in planned rows; of those ...
        self.num_right_guesses = 0  # ... were drawn
        self.num_prompt_tokens = 0  # of admitted sequences; of those ...
        self.num_cached_tokens = 0  # ... found in the prefix cache
        self.rests: Callable[[Sequence], bool] | None = None  # whether a sequence skips a step
        self.drafters: Drafters | None = None  # None: a step draws one token a sequence
        self.token_budget: Callable[[list[Sequence]], int] = lambda running: token_budget  # of a step
        self.cache = cache
        self._free_slots = list(range(max_rows - 1, -1, -1))
        self._by_priority = by_priority
        self.states = StateKeeper(cache) if cache.has_states else None

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_begun(self) -> int:
        """The number of running and preempted sequences."""
        return len(self.running) + sum(sequence.has_begun for sequence in self.queue.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """The number of known but uncomputed tokens of all sequences: the work ahead of a new sequence."""
        known = (*self.running, *self.queue.waiting)
        return sum(sequence.num_tokens - sequence.num_computed for sequence in known)

    def schedule(self) -> StepPlan:
        """Plans the next step. The plan has no rows only if no sequence waits or runs."""
        plan = StepPlan([], [], [])
        self._fill(plan, when_idle=False)
        if not plan.rows:
            self._fill(plan, when_idle=True)
        if self.drafters is not None and self.states is None:
            self._guess(plan, self.drafters)
        return plan

    def _fill(self, plan: StepPlan, *, when_idle: bool) -> None:
        """Plans a step of the sequences that run when idle, or of all others."""
        running = [sequence for sequence in self.running if sequence.request.when_idle == when_idle]
        budget = self.token_budget(running)
        resting = [] if self.rests is None else list(filter(self.rests, running))
        if len(resting) == len(running):
            resting = []
        for sequence in running:
            if sequence in resting:
                continue
            if budget <= 0 or sequence.table is None:  # preempted by an earlier one, and so are all later ones
                break
            num_tokens = sequence.step_tokens(sequence.num_computed, budget)
            end = sequence.num_computed + num_tokens
            if end <= sequence.table.room or self._make_room(sequence, end):
                row = sequence.row(num_tokens)
                plan.sequences.append(sequence)
                plan.rows.append(row if self.states is None else self.states.with_states(sequence, row))
                budget -= num_tokens
        if self.queue.waiting and budget > 0 and all(sequence.table is not None for sequence in running):
            self._admit(plan, budget, when_idle=when_idle)

    def _guess(self, plan: StepPlan, drafters: Drafters) -> None:
        """Spends the rest of the budget on guesses. Preempts no sequence for them."""
        budget = self.token_budget([]) - sum(len(row.token_ids) for row in plan.rows)
        num_rows = sum(row.sample for row in plan.rows)
        budget = min(budget, len(self.running) + len(self._free_slots) + SPARE_DRAWS - num_rows)
        num_drafted = 0 if drafters.batch is None else _draft(plan, self.cache, drafters.batch, budget, num_rows)
        self.num_guesses += num_drafted + _offer(plan, self.cache, drafters.each, budget - num_drafted, num_rows)

    def release(self, sequence: Sequence, *, distrust_from: int | None = None) -> None:
        """Removes a sequence that has ended. See CacheManager.close for `distrust_from`."""
        if sequence.table is None:
            self.queue.remove(sequence)
        else:
            self._stop_running(sequence, distrust_from=distrust_from)

    def preempt_all(self) -> None:
        """Preempts every running sequence."""
        for sequence in reversed(tuple(self.running)):
            self._preempt(sequence)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows the table of a running sequence, preempting others from the end. Returns False if the sequence itself
        was preempted."""
        while sequence.table is not None:
            if self.cache.grow(sequence.table, num_tokens):
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        sequence.counts.preemptions += 1
        self._stop_running(sequence)
        self.queue.add(sequence)

    def _stop_running(self, sequence: Sequence, *, distrust_from: int | None = None) -> None:
        assert sequence.table is not None
        if self.states is not None:
            self.states.end(sequence)
        self.cache.close(sequence.table, distrust_from=distrust_from)
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.table, sequence.slot, sequence.num_computed = None, -1, 0

    def _admit(self, plan: StepPlan, budget: int, *, when_idle: bool) -> None:
        """Admits waiting sequences in the queue's order, up to the first that does not fit; followers are passed
        over."""
        if not self._has_slot(when_idle=when_idle):
            return
        for sequence in self.queue.candidates():
            if budget <= 0 or not self._has_slot(when_idle=when_idle):
                return
            if sequence.request.when_idle != when_idle:
                continue
            if sequence.is_following or (self.is_held and not sequence.has_begun):
                continue
            most = sequence.max_reused
            nodes = self.cache.match(sequence.namespace, sequence.token_ids, most)
            sequence.leader = self._find_leader(sequence, nodes, most // self.cache.page_size)
            if sequence.leader is not None:
                continue
            table = self._open(sequence, nodes, budget)
            if table is None:
                return
            self._start_running(sequence, table)
            num_tokens = sequence.step_tokens(sequence.num_computed, budget)
            plan.sequences.append(sequence)
            row = sequence.row(num_tokens)
            plan.rows.append(row if self.states is None else self.states.with_states(sequence, row))
            plan.new_slots.append(sequence.slot_state())
            budget -= num_tokens

    def _has_slot(self, *, when_idle: bool) -> bool:
        return bool(self._free_slots) or (not when_idle and self._runs_when_idle())

    def _runs_when_idle(self) -> bool:
        """Returns whether a sequence that runs when idle is running; it is the last of the running ones."""
        return bool(self.running) and self.running[-1].request.when_idle

    def _open(self, sequence: Sequence, nodes: list[RadixNode], budget: int) -> PageTable | None:
        """Takes pages for a waiting sequence, also from sequences that run when idle if it is not one of them. Returns
        None if too few pages are available."""
        headroom = self._headroom(sequence)
        first_step = budget
        if sequence.embedded is not None:
            first_step = sequence.step_tokens(len(nodes) * self.cache.page_size, budget)
        while True:
            if self._free_slots:
                table = self.cache.open(
                    sequence.namespace,
                    nodes,
                    sequence.num_tokens,
                    headroom=headroom,
                    first_step=first_step,
                    is_public=not sequence.request.embeds,
                    saves_early=sequence.request.awaits_saving,
                )
                if table is not None:
                    return table
            if sequence.request.when_idle or not self._runs_when_idle():
                return None
            self._preempt(self.running[-1])

    def _headroom(self, sequence: Sequence) -> int:
        """Returns the number of pages that must stay available after an admission. It is 0 if only sequences that run
        when idle are running, so that no sequence is held back for them.

        A preempted sequence needs more available pages than a new one. Otherwise it would soon be preempted again.
        """
        running = [other for other in self.running if sequence.request.when_idle or not other.request.when_idle]
        if not running:
            return 0
        if sequence.has_begun:
            growth = (s.terms.max_tokens - s.num_tokens for s in (*running, sequence))
            return sum(self.cache.num_pages_for(min(RESUME_HEADROOM, tokens)) for tokens in growth)
        return len(running) + 1

    def _find_leader(self, sequence: Sequence, nodes: list[RadixNode], last: int) -> tuple[PageTable, int] | None:
        """Returns the table of a running sequence that will soon have the next page that this one needs, and the number
        of pages that they share, at most `last`."""
        size, index = self.cache.page_size, len(nodes)
        if index >= last or self.cache.has_states:  # it could not use the pages without a saved state
            return None
        tail = nodes[-1] if nodes else None
        page = sequence.token_ids[index * size : (index + 1) * size]
        for other in self.running:
            table = other.table
            if other.request.when_idle and not sequence.request.when_idle:
                continue  # it may skip many steps
            if table is None or not table.is_public or len(table.nodes) != index:
                continue
            if table.namespace != sequence.namespace or (table.nodes[-1] if table.nodes else None) is not tail:
                continue
            if other.token_ids[index * size : (index + 1) * size] == page:
                return table, _num_common_pages(sequence.token_ids, other.token_ids, size, index + 1, last)
        return None

    def _start_running(self, sequence: Sequence, table: PageTable) -> None:
        self.queue.remove(sequence)
        sequence.table = table
        sequence.slot = self._free_slots.pop()
        if self.states is not None:
            self.states.begin(sequence)
        sequence.num_computed = table.num_matched * self.cache.page_size
        if not sequence.has_begun:
            sequence.has_begun = True
            # forced tokens may also be cached
            sequence.counts.cached = min(sequence.num_computed, sequence.terms.num_prompt)
            self.num_prompt_tokens += sequence.terms.num_prompt
            self.num_cached_tokens += sequence.counts.cached
            self.queue.order.admitted(sequence)
        insort(self.running, sequence, key=self._running_rank)  # after those of the same rank

    def _running_rank(self, sequence: Sequence) -> tuple[bool, int]:
        request = sequence.request
        return request.when_idle, -request.priority if self._by_priority else 0


def _offer(plan: StepPlan, cache: CacheManager, drafter: Drafter, budget: int, num_rows: int) -> int:
    """Adds guesses to the rows that have none. Returns how many."""
    num_guesses = 0
    for index, (sequence, row) in enumerate(zip(plan.sequences, plan.rows, strict=True)):
        most = min(budget - num_guesses, sequence.num_left - 1)
        if most > 0 and _may_guess(sequence, row):
            num_guesses += _add_guesses(plan, cache, index, drafter(sequence, most, num_rows)[:most])
    return num_guesses


def _draft(plan: StepPlan, cache: CacheManager, drafter: BatchDrafter, budget: int, num_rows: int) -> int:
    """Adds the guesses of a draft model. Returns how many."""
    asking = [
        index
        for index, (sequence, row) in enumerate(zip(plan.sequences, plan.rows, strict=True))
        if sequence.num_left > 1 and row.num_known <= MOST_KNOWN and _may_guess(sequence, row)
    ]
    if budget <= 0 or not asking:
        return 0

    def grow(sequence: Sequence, count: int) -> bool:
        assert sequence.table is not None
        return cache.grow(sequence.table, sequence.num_tokens + count)

    drafted = drafter([plan.sequences[index] for index in asking], budget, num_rows, grow)
    return sum(_add_guesses(plan, cache, index, guesses) for index, guesses in zip(asking, drafted, strict=True))


def _may_guess(sequence: Sequence, row: Row) -> bool:
    return sequence.table is not None and not row.num_drafts and sequence.takes_guesses(row)


def _add_guesses(plan: StepPlan, cache: CacheManager, index: int, guesses: tuple[int, ...]) -> int:
    """Adds guesses to a row, as far as the grammar and the free pages allow. Returns how many."""
    sequence, row = plan.sequences[index], plan.rows[index]
    assert sequence.table is not None
    guesses = _allowed(sequence, guesses)
    if not guesses or not cache.grow(sequence.table, sequence.num_tokens + len(guesses)):
        return 0
    plan.rows[index] = sequence.row(len(row.token_ids), guesses)
    sequence.counts.guessed += len(guesses)
    return len(guesses)


def _allowed(sequence: Sequence, guesses: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the guesses that the sequence's grammar allows; none if it fails, because the next mask reports the
    error."""
    if sequence.constraint is None:
        return guesses
    try:
        return guesses[: sequence.constraint.num_followed(guesses)]
    except TureenError:
        return ()


def _num_common_pages(first: list[int], other: list[int], size: int, known: int, last: int) -> int:
    """Returns the number of full pages that two token lists share from the start: at least `known`, at most `last`."""
    while known < last and first[known * size : (known + 1) * size] == other[known * size : (known + 1) * size]:
        known += 1
    return known
