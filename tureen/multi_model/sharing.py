"""Says which models of a server have the same weights in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tureen.build import engine_mode
from tureen.config import Config
from tureen.runner.shared_weights import SharedWeights


class CommonWeights(NamedTuple):
    """Weights that several models have in common, and the bytes that they take."""

    weights: SharedWeights
    num_bytes: int


class Sharing:
    """The weights that models of one server have in common, by what they are made of."""

    def __init__(self) -> None:
        self._weights: dict[tuple[str | None, ...], SharedWeights] = {}

    def share(self, config: Config, others: Iterable[Config], num_bytes: int) -> CommonWeights | None:
        """Returns where the weights of a model lie that one of the others has, too; None: they are its own.

        To be called when its files are on disk, and before its engine is started for the first time.
        """
        made_of = _made_of(config)
        if engine_mode(config) != "process" or all(_made_of(other) != made_of for other in others):
            return None
        if made_of not in self._weights:
            self._weights[made_of] = SharedWeights()
        return CommonWeights(self._weights[made_of], num_bytes)


def _made_of(config: Config) -> tuple[str | None, ...]:
    """Returns what tells the weights of one model from those of another: files, and settings that change their
    bytes."""
    path = Path(config.model_path).expanduser()
    where = str(path.resolve()) if path.exists() else config.model_path
    return (where, config.revision, config.dtype, config.quantization, config.load_format, config.kernels)
