"""Sequences between their arrival and the queue: compiles grammars, loads code, replays outputs, encodes pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from tureen.contract.types import OutputDelta
from tureen.engine.client_code import ClientCode
from tureen.engine.encoders import EncodedSequence, Encoders
from tureen.engine.grammars import Grammars
from tureen.engine.replays import Replays
from tureen.engine.sequence import Sequence
from tureen.sandbox.supervisor import helpers_down

if TYPE_CHECKING:
    from tureen.engine.restoring import Restoring


class Preparing:
    """Sequences that cannot be queued yet.

    A sequence waits for one thing at a time: its grammar, a client's code, the replay of an earlier output, the
    embeddings of its pictures, or its stored pages.
    """

    def __init__(self, grammars: Grammars, client_code: ClientCode, encoders: Encoders, context_len: int) -> None:
        self.grammars = grammars
        self.client_code = client_code
        self.replays = Replays()
        self.encoders = encoders
        self.unready: tuple[Sized, ...] = grammars.waiting, client_code.waiting, self.replays.waiting
        """The sequences that wait for other processes, or for `replays.advance`. Pictures are encoded in steps."""
        self.busy: tuple[Sized, ...] = self.unready  # work without steps: `Engine.prepare` checks it often
        self.check: Callable[[], None] | None = None  # raises if a process that the runner needs is lost
        self.restoring: Restoring | None = None  # if pages are stored outside the KV cache
        self._context_len = context_len

    def restore_from(self, restoring: Restoring) -> None:
        """Loads pages from outside the KV cache before their sequence is queued."""
        self.restoring = restoring
        self.unready = (*self.unready, restoring.waiting)
        self.busy = (*self.unready, restoring.loads, restoring.put_off)

    @property
    def num_sequences(self) -> int:
        """The number of sequences that wait here."""
        return sum(map(len, self.unready)) + len(self.encoders.waiting)

    @property
    def helpers_down(self) -> tuple[str, ...] | None:
        """The names of the helper processes that are being replaced; None without helpers.

        Raises as `check` does, because without those processes the engine is lost.
        """
        if self.check is not None:
            self.check()
        supervisors = [place.supervisor for place in (self.grammars, self.client_code) if place.has_helpers]
        return helpers_down(*supervisors) if any(supervisors) or self.check is not None else None

    def begin(self, sequence: Sequence) -> bool:
        """Prepares a new sequence. Returns whether it can be queued immediately.

        Raises TooManyRequests, and Unavailable if its client's code is refused.
        """
        if not sequence.request.processor:
            return self._begin(sequence)
        with self.client_code.acquired(sequence):
            return self._begin(sequence)

    def replay(self, sequence: Sequence) -> None:
        """Begins to replay the output that another engine sent. The sequence's grammar, if it has one, is compiled."""
        self.replays.add(sequence, self._context_len)

    def may_queue(self, sequence: Sequence) -> bool:
        """Returns whether the client's code and stored pages are loaded and the pictures are encoded. Otherwise the
        sequence waits here for them."""
        if sequence.request.processor and self.client_code.must_wait(sequence):
            return False
        if sequence.request.media and not self.encoders.add(sequence):
            return False
        return self.restoring is None or not self.restoring.must_wait(sequence)

    def restore(self) -> list[OutputDelta]:
        """Publishes loaded pages, and queues the sequences that waited for them. Returns the last deltas that waited
        for pages to be saved, and need not wait any longer."""
        if self.restoring is None:
            return []
        self.restoring.advance()
        return self.restoring.take_saved()

    def saved_first(self, end: OutputDelta) -> OutputDelta | None:
        """Returns the last delta of a sequence whose pages must be saved before its end is reported; None if `restore`
        returns it later."""
        if self.restoring is None:
            return end
        self.restoring.put_off.append((end, self.restoring.tier.mark()))
        return None

    def encoded(self, queued: Iterable[Sequence], *, after_step: bool) -> Iterator[EncodedSequence]:
        """Spends some time on pictures, or on pages for which all sequences wait. Yields the sequences that may be
        queued, each with the error if it failed. See Encoders.advance."""
        for encoded in self.encoders.advance(queued, after_step=after_step):
            if encoded.error is not None or self.restoring is None or not self.restoring.must_wait(encoded.sequence):
                yield encoded
        if not after_step and self.restoring is not None:
            self.restoring.wait()

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence that has ended. Returns whether it was here."""
        if sequence.request.processor and self.client_code.release(sequence):
            return True
        for place in (self.grammars, self.replays, self.encoders, self.restoring):
            if place is not None and sequence in place.waiting:
                place.remove(sequence)
                return True
        return False

    def clear(self) -> None:
        """Drops the caches for later requests: compiled grammars, embeddings of pictures."""
        self.grammars.clear()
        self.encoders.clear()
        if self.restoring is not None:
            self.restoring.clear()

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats about waiting sequences."""
        return {
            "helpers_down": self.helpers_down or (),
            **(self.grammars.stats() if self.grammars.has_helpers else {}),
            "total_pictures": self.encoders.num_pictures,
            "total_pictures_encoded": self.encoders.num_encoded,
            **({} if self.restoring is None else {"kv_disk": self.restoring.tier.stats}),
        }

    def _begin(self, sequence: Sequence) -> bool:
        request = sequence.request
        grammar = request.grammar if request.later is None else request.later.spec
        if grammar is not None:
            self.grammars.add(sequence, grammar)
            return False
        if request.resumed:
            self.replay(sequence)
            return False
        return self.may_queue(sequence)
