"""The interface of a family of multi-modal models: it prepares pictures for the model's encoder. Pillow and numpy, no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

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


class PicturePart(NamedTuple):
    """Some of a picture's tokens in the prompt, and the text before them."""

    num_tokens: int  # the next ones of the picture; 0 only for text after them
    text: str = ""
    grid: tuple[int, ...] = ()  # rows and columns of the tokens, for models whose vectors turn with them
    is_whole: bool = False  # layers see all of it at once, also what follows a token


class Normalisation(NamedTuple):
    """The values that the tower takes for pixels in 0 … 255: (pixel * scale - mean) / std."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Vision(Protocol):
    """The description of the vision encoder of a model, as config.json has it. No torch."""

    module: ClassVar[str]  # its `make(vision, arrays, weights, piece)` returns a `PictureEmbedder`

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by the names used here; hidden_size: the language model's."""

    def local_name(self, name: str) -> str | None:
        """Returns the name used here of a checkpoint's weight; None for one that is not used. Raises KeyError."""


class Family(Protocol):
    """Prepares pictures for the models of one family.

    A file of this folder offers `parse(hf, preprocessor) -> Family` and names the models that it serves in MODEL_TYPES.
    hf: config.json; preprocessor: preprocessor_config.json, or {}. It raises StartupError naming the key at fault.
    """

    placeholder: str  # stands for a picture in a prompt's text
    around: str  # text that the model expects before and after a placeholder
    placeholder_id: int | None  # its token id; None where the tokenizer does not know it
    inner_id: int | None  # a token that other servers repeat for a picture's embeddings; None: the placeholder
    video_placeholder: str | None  # None: takes no videos
    video_placeholder_id: int | None
    part_tokens: tuple[str, ...]  # special tokens in the text of parts; a tokenizer without them is refused
    normalisation: Normalisation

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        """Prepares the RGB pictures of one prompt: one Prepared for each, or one for all frames of a video."""

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        """Returns the parts that replace a picture's placeholder in the prompt.

        Raises RequestFailed for a picture that `prepare` cannot have made: the process that decodes may be broken into.
        """
