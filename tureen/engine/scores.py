"""Log-probabilities of one sequence: the known tokens that are still to be scored, and the unsent scores."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.contract.types import LogprobSpec, PositionLogprobs


class ScoreQueue:
    """The requested scores (log-probabilities) of one sequence, in order.

    Known tokens, of the prompt or forced, are scored when they are computed. The scores of drawn tokens arrive with the
    tokens and only pass through here, so that all are sent in order.
    """

    def __init__(self, spec: LogprobSpec, prompt_ids: Sequence[int], num_sent: int = 0) -> None:
        """num_sent: the number of output tokens that another engine has sent. The prompt's scores were sent before
        them."""
        self._num_prompt = len(prompt_ids)
        self._next = self._num_prompt  # first position whose logits are still needed
        self._end = self._num_prompt - 1  # the position after the last of these
        self._prompt: list[PositionLogprobs] = []
        self._output: list[PositionLogprobs] = []  # of output tokens that were not sent yet
        start = spec.prompt_start
        if 0 <= start < self._num_prompt:
            self._prompt.append(PositionLogprobs(token=(None, prompt_ids[start])))
            self._next = start
        self._start = self._next
        if num_sent:
            self._next = self._num_prompt
            self._prompt.clear()

    @property
    def first_needed(self) -> int | None:
        """Returns the first position whose logits are still needed, or None."""
        return self._next if self._next < self._end else None

    def start_again(self) -> bool:
        """Scores the prompt again, because the weights have changed. Returns False if its scores were already sent."""
        if self._start >= self._num_prompt - 1:  # nothing is
            return True
        self._next = self._start
        del self._prompt[1:]
        return bool(self._prompt)

    def ask(self, position: int) -> None:
        """Requests the score of a forced token, which is appended at this position."""
        if self.first_needed is None:
            self._next = position - 1
        self._end = position

    def targets(self, token_ids: Sequence[int], start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Returns, for a row of positions start … end - 1, the index of the first scored one, and the tokens to score:
        the token after each position."""
        score_from = max(0, self._next - start)
        targets = tuple(token_ids[start + score_from + 1 : min(end, self._end) + 1])
        return score_from if targets else 0, targets

    def add(self, scores: Sequence[PositionLogprobs]) -> None:
        """Adds the scores of the next targets."""
        num_prompt = max(0, self._num_prompt - 1 - self._next)
        self._prompt += scores[:num_prompt]
        self._output += scores[num_prompt:]
        self._next += len(scores)

    def add_drawn(self, score: PositionLogprobs) -> None:
        """Adds the score of a token that was drawn."""
        self._output.append(score)

    def take_output(self) -> tuple[PositionLogprobs, ...]:
        """Returns the available scores of the next output tokens, each once."""
        taken = tuple(self._output)
        self._output.clear()
        return taken

    def take_prompt(self) -> tuple[PositionLogprobs, ...]:
        """Returns the scores of the whole prompt, once, when all of them are available."""
        if self._next < self._num_prompt - 1:
            return ()
        taken = tuple(self._prompt)
        self._prompt.clear()
        return taken
