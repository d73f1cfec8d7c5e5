"""Sequences between their arrival and the queue: grammars are compiled, code is loaded, outputs replayed, pictures
encoded."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from tureen.engine.client_code import ClientCode
from tureen.engine.encoders import Encoders
from tureen.engine.grammars import Grammars
from tureen.engine.replays import Replays
from tureen.engine.sequence import Sequence
from tureen.sandbox.supervisor import helpers_down


class Preparing:
    """Sequences that cannot be queued yet, and what each waits for.

    That is a grammar to be compiled, a client's code to be loaded, an earlier output to be replayed, or pictures to be
    encoded. A sequence waits for one of these at a time.
    """

    def __init__(self, grammars: Grammars, client_code: ClientCode, encoders: Encoders, context_len: int) -> None:
        self.grammars = grammars
        self.client_code = client_code
        self.replays = Replays()
        self.encoders = encoders
        self.unready: tuple[Sized, ...] = grammars.waiting, client_code.waiting, self.replays.waiting
        """The sequences that wait for other processes, or for `replays.advance`. Pictures are encoded in steps."""
        self._context_len = context_len

    @property
    def num_sequences(self) -> int:
        """The number of all sequences that wait here."""
        return sum(map(len, self.unready)) + len(self.encoders.waiting)

    @property
    def helpers_down(self) -> tuple[str, ...] | None:
        """Names the helper processes that are being replaced; None where there are no helpers."""
        supervisors = [place.supervisor for place in (self.grammars, self.client_code) if place.has_helpers]
        return helpers_down(*supervisors) if any(supervisors) else None

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
        """Returns whether the client's code is loaded and the pictures are encoded; otherwise the sequence waits here
        for them."""
        if sequence.request.processor and self.client_code.must_wait(sequence):
            return False
        return not sequence.request.media or self.encoders.add(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forgets a sequence that has ended. Returns whether it was here."""
        if sequence.request.processor and self.client_code.release(sequence):
            return True
        for place in (self.grammars, self.replays, self.encoders):
            if sequence in place.waiting:
                place.remove(sequence)
                return True
        return False

    def clear(self) -> None:
        """Forgets what is cached for requests to come: compiled grammars, embeddings of pictures."""
        self.grammars.clear()
        self.encoders.clear()

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats that concern waiting sequences."""
        return {
            "helpers_down": self.helpers_down or (),
            **(self.grammars.stats() if self.grammars.has_helpers else {}),
            "total_pictures": self.encoders.num_pictures,
            "total_pictures_encoded": self.encoders.num_encoded,
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
