"""Tokens of a prompt that are given as embeddings, of a client or of pictures, and their positions."""

from __future__ import annotations

import numpy as np

from tureen.contract.types import NO_TOKEN, GenerateRequest


class Embedded:
    """The parts of one prompt that the runner needs in addition to its token ids: embeddings of text or pictures."""

    def __init__(self, request: GenerateRequest) -> None:
        self._given = request.embeds
        self._num_prompt = len(request.token_ids)
        self.media = request.media
        self.encoded: list[bytes] = []  # of the media that are encoded so far
        self._places = TokenPlaces(request) if any(item.grid for item in request.media) else None

    @property
    def end(self) -> int:
        """The position after the last token that is given as an embedding; 0 if there is none."""
        return self._num_prompt if self._given else max(item.start + item.num_tokens for item in self.media)

    def between(self, start: int, end: int) -> bytes:
        """Returns the embeddings of those positions from start to end - 1 that have one: float32 [k, hidden_size] as
        bytes."""
        if start >= self.end:
            return b""
        if self._given:
            size = len(self._given) // self._num_prompt
            return self._given[start * size : end * size]
        rows = b""
        for item, embeddings in zip(self.media, self.encoded, strict=True):
            size = len(embeddings) // item.num_rows
            first, last = (min(max(0, place - item.start), item.num_tokens) for place in (start, end))
            rows += embeddings[(item.rows_before + first) * size : (item.rows_before + last) * size]
        return rows

    def step_end(self, start: int, end: int) -> int:
        """Returns the end of a step of positions start to end - 1, moved so that the step splits no whole picture.

        It is before the picture, or after it if the step has nothing else.
        """
        for picture, picture_end in self.pictures(start, end):
            if picture_end > end:
                return picture if picture > start else picture_end
        return end

    def pictures(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Returns the bounds of the whole pictures among positions start to end - 1, see contract.runner.Row."""
        whole = ((item.start, item.start + item.num_tokens) for item in self.media if item.is_whole)
        return tuple((first, last) for first, last in whole if first < end and start < last)

    def places(self, start: int, end: int) -> bytes:
        """Returns the places of positions start to end - 1, see contract.runner.Row; empty for a model without them."""
        return b"" if self._places is None else self._places.between(start, end)


class TokenPlaces:
    """Frames, rows and columns of a sequence's tokens (arXiv:2409.12191, section 2.1).

    All three of a text token are its position, if each picture counts as many tokens as its longer side.
    """

    def __init__(self, request: GenerateRequest) -> None:
        num_prompt = len(request.token_ids)
        self._of_prompt = np.zeros((num_prompt, 3), np.int32)
        end = place = 0  # after the tokens that have their places
        for item in request.media:
            if not item.grid:
                continue
            place = self._count(end, item.start, place)
            end = item.start + item.num_tokens
            rows, columns = item.grid
            self._of_prompt[item.start : end] = place
            self._of_prompt[item.start : end, 1:] += np.indices((rows, columns), np.int32).reshape(2, -1).T
            place += max(rows, columns)
        self._shift = self._count(end, num_prompt, place) - num_prompt

    def between(self, start: int, end: int) -> bytes:
        """Returns the places of positions start to end - 1: int32 [positions, 3] as bytes."""
        num_prompt = len(self._of_prompt)
        places = self._of_prompt[start:end]
        if end > num_prompt:
            output = np.arange(max(start, num_prompt), end, dtype=np.int32) + np.int32(self._shift)
            places = np.concatenate([places, np.repeat(output[:, None], 3, axis=1)])
        return places.tobytes()

    def _count(self, start: int, end: int, place: int) -> int:
        """Sets the places of the text from start to end, beginning with `place`; returns the next place."""
        self._of_prompt[start:end] = np.arange(place, place + end - start, dtype=np.int32)[:, None]
        return place + end - start


def without_digests(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the token ids with NO_TOKEN in place of the digests of pictures' tokens."""
    return tuple(max(token_id, NO_TOKEN) for token_id in token_ids)
