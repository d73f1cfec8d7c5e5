"""The interface of a family of multi-modal models: it prepares pictures for the model's encoder. Pillow and numpy, no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Modality = Literal["image", "multi-images", "video"]
"""One picture, several in one prompt, or the frames of a video."""


class Prepared(NamedTuple):
    """A picture, or a video's frames, as the encoder takes them: resized and cropped, not normalised."""

    pixels: NDArray[np.uint8]  # [tiles, height, width, 3]
    num_tokens: int  # that it becomes in the prompt
    layout: tuple[int, ...] = ()  # what more the family's encoder must know, such as the picture's own height and width


class Family(Protocol):
    """Prepares pictures for the models of one family.

    A file of this folder offers `parse(hf, preprocessor) -> Family` and names the models that it serves in MODEL_TYPES.
    hf: config.json; preprocessor: preprocessor_config.json, or {}. It raises StartupError naming the key at fault.
    """

    placeholder: str  # stands for a picture in a prompt's text
    placeholder_id: int | None  # its token id; None where the tokenizer does not know it
    video_placeholder: str | None  # None: takes no videos
    video_placeholder_id: int | None

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        """Prepares the RGB pictures of one prompt: one Prepared for each, or one for all frames of a video."""
