"""What comes of a request, whichever API shows it: all that there is so far, growing."""

from __future__ import annotations

import copy
import math
import time

from tureen.contract.types import FinishReason, GenerateRequest, OutputDelta, PositionLogprobs, Usage
from tureen.errors import Unavailable


class Output:
    """What has come of one request so far. Also remembers how much of it was sent."""

    def __init__(self, request: GenerateRequest, index: int, rid: str, arrived_s: float | None = None) -> None:
        self.request = request  # without pixels
        self.index = index
        self.rid = rid
        self.text = ""
        self.token_ids: list[int] = []
        self.usage = Usage(len(request.token_ids), 0, 0)
        self.output_logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.hidden_states: list[bytes] = []
        self.finish: FinishReason | None = None
        self.started_s = time.monotonic() if arrived_s is None else arrived_s
        self.elapsed_s = 0.0
        self.sent_tokens = 0
        self.sent_chars = 0
        self.weight_versions: list[str] = []  # of the weights that computed it; several where it was paused meanwhile

    def note_weights(self, version: str) -> None:
        """A piece of it has come, computed by these."""
        if self.weight_versions[-1:] != [version]:
            self.weight_versions.append(version)

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.output_logprobs += delta.output_logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.hidden_states += delta.hidden_states
        self.usage = delta.usage or self.usage
        self.elapsed_s = time.monotonic() - self.started_s
        if delta.finish is not None and delta.finish.reason == "shutdown":
            raise Unavailable("the server was shut down before the request ended", code="draining")
        self.finish = delta.finish

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that an answer shows of it so far."""
        spec = self.request.logprobs
        if spec is None:
            return 0
        return (len(self.prompt_logprobs) + len(self.output_logprobs)) * (1 + spec.top + len(spec.token_ids))

    def snapshot(self) -> Output:
        """As it is now, for a thread: it grows meanwhile."""
        found = copy.copy(self)
        for name in ("token_ids", "output_logprobs", "prompt_logprobs", "hidden_states", "weight_versions"):
            setattr(found, name, list(getattr(self, name)))
        return found

    @property
    def cumulative_logprob(self) -> float:
        """Of all its tokens, which were asked for with their log-probabilities."""
        return math.fsum(position.token[0] or 0.0 for position in self.output_logprobs)
