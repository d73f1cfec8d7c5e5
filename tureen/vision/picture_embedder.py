"""The interface of the vision encoder of a model."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from tureen.vision.arrays import Array

Work = Generator[int, None, Array]
"""Yields the floating-point operations of each piece of work after it is done, and returns the result."""


class PictureEmbedder(Protocol):
    """Turns pictures into embeddings of the language model.

    A file of this folder offers `make(vision, arrays, weights, piece) -> PictureEmbedder` for the `Vision` that names
    it. arrays: what computes; weights: those of `vision.weights`; piece: floating-point operations that may be done at
    once, about.
    """

    def embed(self, pictures: Array, layout: tuple[int, ...]) -> Work:
        """Embeds a picture [tiles, 3, height, width], normalised: returns [tokens, hidden_size].

        layout: that of its `Prepared`. Raises RequestFailed when it is not that of such tiles, before anything is
        computed.
        """
