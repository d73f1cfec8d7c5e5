"""The grammars of an engine's sequences: compiled in other processes, with masks filled during the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from tureen.contract.runner import Row, RowError
from tureen.contract.types import LaterGrammar
from tureen.engine.constraint import Constraint, following
from tureen.engine.sequence import Sequence
from tureen.errors import InvalidRequest, TureenError
from tureen.grammar import CompiledGrammar, Grammar, GrammarSpec
from tureen.grammar.shortest_completion import way_out
from tureen.grammar_service.compiler import Compilation, Compiler
from tureen.grammar_service.masks import MaskThread, PendingMasks
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import Supervisor


class Grammars:
    """Sequences that wait for their grammar, and the masks of running ones."""

    def __init__(
        self, compiler: Compiler | None, masks: MaskThread, eos_token_ids: tuple[int, ...], context_len: int
    ) -> None:
        self._compiler = compiler
        self._context_len = context_len
        self._masks = masks
        self._eos_token_ids = eos_token_ids
        self.has_helpers = compiler is not None
        self.waiting: dict[Sequence, Compilation] = {}  # read from outside, changed here only

    def add(self, sequence: Sequence, spec: GrammarSpec) -> None:
        """Requests the compilation of a sequence's grammar; the sequence waits here until `take_ready`. Raises
        InvalidRequest."""
        if self._compiler is None:
            field = sequence.request.grammar_field
            raise InvalidRequest(f"{field}: the server runs with --grammar-backend none; leave it out", field=field)
        self.waiting[sequence] = self._compiler.submit(spec)

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the compile processes; None before they start."""
        return None if self._compiler is None else self._compiler.supervisor

    def share(self, budget: MemoryBudget) -> None:
        """Counts the memory of the compile workers for this budget."""
        if self._compiler is not None:
            self._compiler.share(budget)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits here and has ended."""
        compilation = self.waiting.pop(sequence)
        if self._compiler is not None:
            self._compiler.release(compilation)

    def take_ready(self) -> list[tuple[Sequence, RowError | None]]:
        """Returns the sequences that need not wait any longer, each with an error or, if it has its constraint,
        None."""
        if self._compiler is None:
            return []
        self._compiler.poll()
        done = [
            (sequence, compilation) for sequence, compilation in self.waiting.items() if compilation.state != "pending"
        ]
        for sequence, _ in done:
            del self.waiting[sequence]
        return [(sequence, self._start(sequence, compilation)) for sequence, compilation in done]

    def fill_masks(self, sequences: Iterable[Sequence], rows: Iterable[Row]) -> PendingMasks | None:
        """Begins to fill the masks of the constrained rows that draw a token; returns None if there are none."""
        fills, num_masks = {}, {}
        for sequence, row in zip(sequences, rows, strict=True):
            if sequence.constraint is not None and row.sample:
                guesses = row.token_ids[row.num_known :]
                fills[row.slot] = partial(sequence.constraint.fill_masks, left=sequence.num_left, guesses=guesses)
                num_masks[row.slot] = 1 + len(guesses)
        return self._masks.start(fills, num_masks) if fills else None

    def clear(self) -> None:
        """Drops the cached grammars."""
        if self._compiler is not None:
            self._compiler.clear()

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats about grammars."""
        if self._compiler is None:
            return {}
        totals = self._compiler.stats
        return {
            "num_preparing": len(self.waiting),
            "total_grammar_compiles": totals.compiles,
            "total_grammar_hits": totals.hits,
            "total_grammar_failures": totals.failures,
            "total_grammar_timeouts": totals.timeouts,
            "total_grammar_ms": totals.compile_ms,
        }

    def close(self) -> None:
        self._masks.close()
        if self._compiler is not None:
            self._compiler.close()

    def _start(self, sequence: Sequence, compilation: Compilation) -> RowError | None:
        field = sequence.request.grammar_field
        if sequence.asked.times is not None:
            sequence.asked.times.note_compiled()
        if compilation.compiled is None:
            assert compilation.error is not None
            error = compilation.error
            return RowError(error.code, f"{field}: {error.message}", error.status, field, error.retry_after_s)
        try:
            with following(field):
                grammar = compilation.compiled.start()
        except TureenError as error:
            return RowError.of(error)
        if sequence.request.later is not None:
            return self._leave_room(sequence, sequence.request.later, compilation.compiled, grammar)
        most = None
        params, compiled = sequence.request.params, compilation.compiled
        if compiled.least is not None and params.close_early and sequence.request.max_new_tokens > 0:
            try:
                with following(field):
                    least = _least(compiled, grammar, self._context_len, sequence.num_left)
            except TureenError as error:
                return RowError.of(error)
            refusal = _fit(sequence, least, self._context_len)
            if refusal is not None:
                return refusal
            most = sequence.num_left
        sequence.constraint = Constraint(
            grammar,
            compiled.ends,
            avoids_end=params.ignore_eos,
            field=field,
            most=most,
            reserve=compiled.reserve,
            unenforced=compilation.unenforced,
        )
        return None

    def _leave_room(
        self, sequence: Sequence, later: LaterGrammar, compiled: CompiledGrammar, grammar: Grammar
    ) -> RowError | None:
        """Lowers the limit of an output so that the rest is enough for the answer after it. Returns the error if not
        even one token would leave enough for the answer."""
        if compiled.least is None:
            return None
        field, most = sequence.request.grammar_field, max(0, later.room - 1)
        try:
            with following(field):
                least = _least(compiled, grammar, self._context_len, most)
        except TureenError as error:
            return RowError.of(error)
        if least > most:
            message = (
                f"{later.limits} leaves {most} tokens for the answer after the reasoning and its end mark, but the "
                f"shortest output that {field} allows takes {least} tokens; allow more"
            )
            return RowError("max_new_tokens_too_small", message, 400, later.field)
        most_thought = max(1, later.room - least - compiled.reserve)
        max_tokens = min(sequence.terms.max_tokens, sequence.terms.num_prompt + most_thought)
        sequence.terms = sequence.terms._replace(max_tokens=max_tokens)
        return None


def _least(compiled: CompiledGrammar, grammar: Grammar, most: int, left: int) -> int:
    """Returns the minimum number of tokens of an output. A guarded output may need more than the grammar counts."""
    least = compiled.least or 0
    if not compiled.reserve or left >= least + compiled.reserve:
        return least
    way = way_out(grammar, compiled.ends, most)
    return least if way is None else len(way)


def _fit(sequence: Sequence, least: int, context_len: int) -> RowError | None:
    """Raise the limit to that of the shortest output, if the client set none. Return the error if the limit is too
    small."""
    request = sequence.request
    most = context_len - sequence.terms.num_prompt
    needed = f"the shortest output that {request.grammar_field} allows takes {least} tokens"
    if least > most:
        num_prompt = sequence.terms.num_prompt
        message = f"{needed}, but only {most} fit after the prompt's {num_prompt}; shorten the prompt or the constraint"
        return RowError("context_exceeded", message, 400, request.grammar_field)
    if sequence.num_left >= least:
        return None
    if request.limit_field:
        message = f"{request.limit_field} is {sequence.num_left}, but {needed}; send at least {least}, or leave it out"
        return RowError("max_new_tokens_too_small", message, 400, request.limit_field)
    sequence.terms = sequence.terms._replace(max_tokens=sequence.terms.num_prompt + least)
    return None
