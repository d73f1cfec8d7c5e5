"""Sequences between their arrival and the queue: grammars are compiled, code is loaded, outputs replayed, pictures
encoded."""

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
    """Sequences that cannot be queued yet, and what each waits for.

    That is a grammar to be compiled, a client's code to be loaded, an earlier output to be replayed, pictures to be
    encoded, or pages to be loaded. A sequence waits for one of these at a time.
    """

    def __init__(self, grammars: Grammars, client_code: ClientCode, encoders: Encoders, context_len: int) -> None:
        self.grammars = grammars
        self.client_code = client_code
        self.replays = Replays()
        self.encoders = encoders
        self.unready: tuple[Sized, ...] = grammars.waiting, client_code.waiting, self.replays.waiting
        """The sequences that wait for other processes, or for `replays.advance`. Pictures are encoded in steps."""
        self.busy: tuple[Sized, ...] = self.unready  # what goes on without a step: `Engine.prepare` looks at it often
        self.check: Callable[[], None] | None = None  # raises when a process that the runner needs is lost
        self.restoring: Restoring | None = None  # where pages are kept outside the KV cache
        self._context_len = context_len

    def restore_from(self, restoring: Restoring) -> None:
        """Has pages loaded that are kept outside the KV cache, before their sequence is queued."""
        self.restoring = restoring
        self.unready = (*self.unready, restoring.waiting)
        self.busy = (*self.unready, restoring.loads, restoring.put_off)

    @property
    def num_sequences(self) -> int:
        """The number of all sequences that wait here."""
        return sum(map(len, self.unready)) + len(self.encoders.waiting)

    @property
    def helpers_down(self) -> tuple[str, ...] | None:
        """Names the helper processes that are being replaced; None where there are no helpers.

        Raises what `check` raises: without those processes the engine is lost.
        """
        if self.check is not None:
            self.check()
        supervisors = [place.supervisor for place in (self.grammars, self.client_code) if place.has_helpers]
        return helpers_down(*supervisors) if any(supervisors) or self.check is not None else None

    def begin(self, sequence: Sequence) -> bool:
        """Takes a sequence that has arrived. Returns whether it can be queued at once.

        Raises TooManyRequests, Unavailable where its client's code is not taken.
        """
        if not sequence.request.processor:
            return self._begin(sequence)
        with self.client_code.acquired(sequence):
            return self._begin(sequence)

    def replay(self, sequence: Sequence) -> None:
        """Begins to replay the output that another engine sent. The sequence's grammar, if it has one, is compiled."""
        self.replays.add(sequence, self._context_len)

    def may_queue(self, sequence: Sequence) -> bool:
        """Returns whether the client's code is loaded, the pictures are encoded and pages that are kept elsewhere
        loaded; otherwise the sequence waits here for them."""
        if sequence.request.processor and self.client_code.must_wait(sequence):
            return False
        if sequence.request.media and not self.encoders.add(sequence):
            return False
        return self.restoring is None or not self.restoring.must_wait(sequence)

    def restore(self) -> list[OutputDelta]:
        """Publishes the pages that are loaded, and queues the sequences that waited for them. Returns the last deltas
        that were put off until pages were saved, and need not wait any longer."""
        if self.restoring is None:
            return []
        self.restoring.advance()
        return self.restoring.take_saved()

    def saved_first(self, end: OutputDelta) -> OutputDelta | None:
        """Returns the last delta of a sequence whose pages are to be saved before anybody hears of its end; None where
        `restore` returns it later."""
        if self.restoring is None:
            return end
        self.restoring.put_off.append((end, self.restoring.tier.mark()))
        return None

    def encoded(self, queued: Iterable[Sequence], *, after_step: bool) -> Iterator[EncodedSequence]:
        """Spends some time on pictures, or on pages that all wait for. Yields the sequences that may be queued, with
        the reason where one failed. See Encoders.advance."""
        for encoded in self.encoders.advance(queued, after_step=after_step):
            if encoded.error is not None or self.restoring is None or not self.restoring.must_wait(encoded.sequence):
                yield encoded
        if not after_step and self.restoring is not None:
            self.restoring.wait()

    def remove(self, sequence: Sequence) -> bool:
        """Forgets a sequence that has ended. Returns whether it was here."""
        if sequence.request.processor and self.client_code.release(sequence):
            return True
        for place in (self.grammars, self.replays, self.encoders, self.restoring):
            if place is not None and sequence in place.waiting:
                place.remove(sequence)
                return True
        return False

    def clear(self) -> None:
        """Forgets what is cached for requests to come: compiled grammars, embeddings of pictures."""
        self.grammars.clear()
        self.encoders.clear()
        if self.restoring is not None:
            self.restoring.clear()

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats that concern waiting sequences."""
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
