"""Finds the log-probabilities of the tokens that make up a text of a response, among those of its whole output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.contract.types import PositionLogprobs, TokenLogprob
from tureen.dialects.openai.token_fields import TokenBody, TokenNames, alternatives
from tureen.requests.generation import Output
from tureen.requests.state import Context


class TextLogprobs:
    """Follows an output token by token beside its texts, which stand in it in their order: reasoning, calls of tools
    and special tokens lie between them."""

    def __init__(self, body: TokenBody, context: Context, count: int) -> None:
        """count: best alternatives of each token."""
        self._tokenizer = context.tokenizer
        self._names = TokenNames(body, context)
        self._count = count
        self._bytes = b""  # of all tokens so far
        self._ends: list[int] = []  # where each token ends in them
        self._positions: Sequence[PositionLogprobs] = ()
        self._read = 0  # bytes that were found to be some text, and those before them
        self._num_given = 0  # tokens that belong to texts so far, and those before them

    def catch_up(self, output: Output) -> None:
        """Adds the tokens that are new in an output that has log-probabilities."""
        for token_id in output.token_ids[len(self._ends) :]:
            self._bytes += self._tokenizer.token_bytes(token_id)
            self._ends.append(len(self._bytes))
        self._positions = output.output_logprobs

    def skip(self, text: str) -> None:
        """Skips a text whose log-probabilities were not requested."""
        self._find(text)

    def take(self, text: str) -> list[dict[str, Any]]:
        """Returns the log-probabilities of the tokens of the next text. A token that reaches over its beginning came
        with the text before it."""
        begin = self._find(text)
        taken = []
        for index in range(self._num_given, min(len(self._ends), len(self._positions))):
            start = self._ends[index - 1] if index else 0
            if start >= self._read:
                break
            self._num_given = index + 1
            if self._ends[index] > begin:
                taken.append(self._entry(self._positions[index]))
        return taken

    def _find(self, text: str) -> int:
        """Moves behind the next occurrence of a text, and returns where it begins. A text that is not there, because
        its parser has changed it, ends with the last token."""
        data = text.encode()
        begin = self._bytes.find(data, self._read)
        if begin < 0:
            begin, self._read = self._read, len(self._bytes)
        else:
            self._read = begin + len(data)
        return begin

    def _entry(self, position: PositionLogprobs) -> dict[str, Any]:
        top = [self._token(alternative) for alternative in alternatives(position, self._count)]
        return self._token(position.token) | {"top_logprobs": top}

    def _token(self, logprob: TokenLogprob) -> dict[str, Any]:
        value, token_id = logprob
        return {
            "token": self._names.name(token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
            "logprob": value,
        }


def without_bytes(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns log-probabilities as the events of a stream have them."""
    return [
        {name: value for name, value in entry.items() if name not in ("bytes", "top_logprobs")}
        | ({"top_logprobs": without_bytes(entry["top_logprobs"])} if "top_logprobs" in entry else {})
        for entry in entries
    ]
