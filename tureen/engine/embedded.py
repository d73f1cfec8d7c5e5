"""Tokens of a prompt that are given as embeddings: a client's own, or what pictures become."""

from __future__ import annotations

from tureen.contract.types import NO_TOKEN, GenerateRequest


class Embedded:
    """The parts of one prompt that the runner needs beside its token ids: embeddings, of text or of pictures."""

    def __init__(self, request: GenerateRequest) -> None:
        self._given = request.embeds
        self._num_prompt = len(request.token_ids)
        self.media = request.media
        self.encoded: list[bytes] = []  # of the media, as far as they are encoded

    @property
    def end(self) -> int:
        """The position after the last token that is given as an embedding; 0 where there is none."""
        return self._num_prompt if self._given else max(item.start + item.num_tokens for item in self.media)

    def between(self, start: int, end: int) -> bytes:
        """Returns the embeddings of those positions from start to end - 1 that have one: float32 [k, hidden_size] as
        bytes."""
        if self._given:
            size = len(self._given) // self._num_prompt
            return self._given[start * size : end * size]
        rows = b""
        for item, embeddings in zip(self.media, self.encoded, strict=True):
            size = len(embeddings) // item.num_rows
            first, last = (min(max(0, place - item.start), item.num_tokens) for place in (start, end))
            rows += embeddings[(item.rows_before + first) * size : (item.rows_before + last) * size]
        return rows


def without_digests(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the token ids with NO_TOKEN in place of the digests that stand for a picture's tokens."""
    return tuple(max(token_id, NO_TOKEN) for token_id in token_ids)
