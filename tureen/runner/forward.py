"""The contract between a runner and a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tureen.lora.adapter import Adapter
from tureen.runner.base import Batch
from tureen.runner.trace import Trace, TraceOptions
from tureen.sampling.arithmetic import Logits, Peaks


class Forward(Protocol):
    """A model on a device. Tokens of a step stand one after another, in the order of its rows."""

    dtype: str
    device_name: str

    def run(self, batch: Batch) -> None:
        """Compute and store K/V of all rows, and the logits of those that sample."""

    def best(self) -> list[int]:
        """Returns, for each row that samples, the token that `Arithmetic.greedy` gives it without a mask."""

    def sampled(self) -> tuple[Logits, Peaks]:
        """The logits [rows that sample, vocab] of the last step. They hold until the next call of `run` or `logits`."""

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Returns the logits of tokens of the last step: [tokens, vocab]; they hold until the next call."""

    def last_hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the states of tokens of the last step after the final norm: [tokens, hidden_size]."""

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Rows may name it by its number from now on. Raises InvalidRequest when it cannot be used here."""

    def unload_adapter(self, number: int) -> None: ...

    def are_finite(self, logits: Logits) -> bool: ...

    def keep(self, logits: Logits) -> Logits:
        """A copy that outlives the next call."""

    def start_trace(self, options: TraceOptions) -> Trace:
        """Starts to record the steps from now on. Raises InvalidRequest for what cannot be recorded here."""
