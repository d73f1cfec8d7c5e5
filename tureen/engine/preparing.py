"""Sequences between their arrival and the queue: grammars are compiled, code is loaded, outputs replayed, pictures
encoded."""

from __future__ import annotations

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
        self._context_len = context_len

    def __len__(self) -> int:
        """Returns the number of sequences that wait for other processes or for `replays.advance`, not for pictures:
        these are encoded in steps."""
        return len(self.grammars.waiting) + len(self.client_code.waiting) + len(self.replays.waiting)

    @property
    def num_sequences(self) -> int:
        """The number of all sequences that wait here."""
        return len(self) + len(self.encoders.waiting)

    @property
    def helpers_down(self) -> tuple[str, ...] | None:
        """Names the helper processes that are being replaced; None where there are no helpers."""
        supervisors = self.grammars.supervisor, self.client_code.supervisor
        return helpers_down(*supervisors) if any(supervisors) else None

    def begin(self, sequence: Sequence) -> bool:
        """Takes a sequence that has arrived. Returns whether it can be queued at once.

        Raises TooManyRequests, Unavailable where its client's code is not taken.
        """
        request = sequence.request
        with self.client_code.acquired(sequence):
            if request.grammar is not None:
                self.grammars.add(sequence, request.grammar)
                return False
            if request.resumed:
                self.replay(sequence)
                return False
            return self.may_queue(sequence)

    def replay(self, sequence: Sequence) -> None:
        """Begins to replay the output that another engine sent. The sequence's grammar, if it has one, is compiled."""
        self.replays.add(sequence, self._context_len)

    def may_queue(self, sequence: Sequence) -> bool:
        """Returns whether the client's code is loaded and the pictures are encoded; otherwise the sequence waits here
        for them."""
        if self.client_code.must_wait(sequence):
            return False
        return not sequence.request.media or self.encoders.add(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forgets a sequence that has ended. Returns whether it was here."""
        if self.client_code.release(sequence):
            return True
        for place in (self.grammars, self.replays, self.encoders):
            if sequence in place:
                place.remove(sequence)
                return True
        return False

    def clear(self) -> None:
        """Forgets what is cached for requests to come: compiled grammars, embeddings of pictures."""
        self.grammars.clear()
        self.encoders.clear()

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats that concern waiting sequences."""
        return {**self.grammars.stats(), **self.encoders.stats(), "helpers_down": self.helpers_down or ()}
