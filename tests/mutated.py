"""Noise in one kind of a model's weights: every comparison with transformers must notice it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

NOISE = 0.05
"""Standard deviation. Noise, as a common factor cancels in a norm or in a softmax."""


def kind(name: str) -> str:
    """Return a weight's name with `*` for the number of a layer or an expert: one for all of them."""
    return re.sub(r"\.\d+\.", ".*.", name)


def kinds(names: Iterable[str]) -> list[str]:
    """Return each kind of these weights once."""
    return list(dict.fromkeys(map(kind, names)))


def with_noise(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy of the values with noise added."""
    return values + np.float32(NOISE) * np.random.default_rng(values.size).standard_normal(values.shape, np.float32)


def folders_with_noise(model: Path, folder: Path, is_used: Callable[[str], bool]) -> Iterator[str]:
    """Yield each kind of weight that is used, once `folder` is a copy of the model's folder with noise in it."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    for changed in filter(is_used, kinds(weights)):
        tensors = {
            name: torch.tensor(with_noise(weight.numpy())) if kind(name) == changed else weight
            for name, weight in weights.items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        yield changed
