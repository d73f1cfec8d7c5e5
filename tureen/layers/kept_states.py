"""The states of sequences in layers of the torch model that have no attention."""

from __future__ import annotations

from torch import Tensor

from tureen.attention.base import Span


class KeptStates:
    """The states of sequences: float32 [states, numbers]."""

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def before(self, span: Span, start: int, size: int) -> Tensor:
        """Returns a copy of a layer's numbers before the span: zeros at the start of a sequence."""
        if span.state_from < 0:
            return self.states.new_zeros(size)
        return self.states[span.state_from, start : start + size].clone()

    def save(self, span: Span, after: int, start: int, values: Tensor) -> None:
        """Keeps a layer's numbers wherever the span saves the state after its first `after` tokens."""
        numbers = [number for count, number in span.state_saves if count == after]
        if after == span.length:
            numbers.append(span.state_to)
        for number in numbers:
            self.states[number, start : start + values.numel()] = values.reshape(-1)
