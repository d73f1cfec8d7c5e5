"""Yields the weights of the vision encoder of a model, whatever file they are in. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.weights.gguf import GgufFile
from tureen.weights.gguf_facts import GgufFacts
from tureen.weights.mapped import TensorInfo
from tureen.weights.mmproj import projector_of
from tureen.weights.projectors import ProjectorKind, inner_size
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import VISION, Stored, iter_plain, readable, row_order, to_float32

LAYER: Final = re.compile(r"v\.blk\.(\d{1,6})\.([a-z_\d]+)")
NUMBERED: Final = re.compile(r"\.(\d{1,6})\.")
SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
PATCHES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The parts of the matrix of patches for each of two frames; models without frames have the first."""
SOUNDS: Final = ("a.", "mm.a.")
"""Beginnings of the names of an audio encoder, which is not supported."""


def iter_vision(source: ModelSource) -> Iterator[Stored]:
    """Yields every weight of the vision encoder by a checkpoint's names; otherwise as `stored.iter_stored`."""
    if source.projector is None:
        return iter_plain(source, lambda name: name.startswith(VISION))
    deep = model_config(source)["vision_config"].get("deepstack_visual_indexes", [])
    return map(readable, _of_mmproj(source.projector, deep))


class _Names(NamedTuple):
    """How the tensors of a file are called in checkpoints."""

    projector: ProjectorKind
    deep: Sequence[int]  # layers with a merger of their own
    is_swapped: bool

    def of(self, name: str) -> str | None:
        """Returns the name in checkpoints; None for an unknown tensor."""
        if own := self.projector.whole_names.get(name):
            return own
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias", *self.projector.scalars):
            return None
        if match := LAYER.fullmatch(stem):
            part = SWAPPED.get(match[2], match[2]) if self.is_swapped else match[2]
            own = self.projector.layer_names.get(part)
            return None if own is None else f"{self.projector.layer.format(int(match[1]))}{own}.{kind}"
        number = NUMBERED.search(stem)
        pattern = NUMBERED.sub(".{}.", stem, count=1)
        if number is not None and pattern in self.projector.names and int(number[1]) in self.deep:
            return f"{self.projector.names[pattern].format(self.deep.index(int(number[1])))}.{kind}"
        own = self.projector.names.get(stem)
        return None if own is None else f"{own}.{kind}"


def _of_mmproj(file: GgufFile, deep: Sequence[int]) -> Iterator[Stored]:
    """Raises StartupError naming a tensor that is missing or not known."""
    facts = GgufFacts(file)
    projector = projector_of(facts)
    names = _Names(projector, deep, inner_size(facts)[1])
    heads = facts.count("vision.attention.head_count")
    for info in file.tensors.values():
        if info.name in (*projector.unused, PATCHES[1]) or (projector.may_hear and info.name.startswith(SOUNDS)):
            continue
        if projector.joins_qkv and (joined := _qkv_names(info.name)):
            if info.name == joined[0]:
                yield _joined(file, joined, names)
            continue
        if info.name == PATCHES[0] and PATCHES[1] in file.tensors:
            yield _with_frames(file, names)
            continue
        if info.name == PATCHES[0] and projector.colours_last:
            yield _with_colours_last(file, names)
            continue
        yield _plain(file, info, names, heads)
        file.release(info)


def _plain(file: GgufFile, info: TensorInfo, names: _Names, heads: int) -> Stored:
    """Returns a tensor that is a weight of its own."""
    projector, name = names.projector, names.of(info.name)
    if name is None:
        raise GgufFacts(file).fault(f"tensor {echo(info.name)} is not part of a known model")
    turns = projector.interleaves and info.name.split(".")[-2] in ("attn_q", "attn_k")
    order = row_order(file.path, info, heads if turns else None)
    offset = -1.0 if info.name in projector.plus_one else 0.0
    is_scalar = info.shape == (1,) and info.name.endswith(projector.scalars)
    return Stored(name, () if is_scalar else info.shape, info.encoding.name, file.raw(info), order, offset)


def _qkv_names(name: str) -> list[str]:
    """Returns the names of the tensors of q, k and v of which this is one; [] for another tensor."""
    stem, _, kind = name.rpartition(".")
    if not LAYER.fullmatch(stem) or not stem.endswith((".attn_q", ".attn_k", ".attn_v")):
        return []
    return [f"{stem[:-1]}{part}.{kind}" for part in "qkv"]


def _joined(file: GgufFile, parts: list[str], names: _Names) -> Stored:
    """Returns q, k and v as one matrix or vector."""
    infos = [_existing(file, name) for name in parts]
    if len({info.shape[1:] for info in infos}) > 1 or not infos[0].shape:
        raise StartupError(f"model {file.path}: tensors {', '.join(parts)} do not have rows of one length")
    stem, _, kind = parts[0].rpartition(".")
    name = names.of(f"{stem.removesuffix('_q')}_qkv.{kind}") or parts[0]
    shape = (sum(info.shape[0] for info in infos), *infos[0].shape[1:])
    kinds = {info.encoding.name for info in infos}
    if len(kinds) == 1:
        return Stored(name, shape, kinds.pop(), lambda: np.concatenate([file.raw(info) for info in infos]))
    return Stored(name, shape, "F32", lambda: np.concatenate([_values(file, info) for info in infos]).view(np.uint8))


def _with_frames(file: GgufFile, names: _Names) -> Stored:
    """Returns the matrix of patches of two frames, [outputs, 3, 2, height, width]."""
    infos = [_existing(file, name) for name in PATCHES]
    if infos[0].shape != infos[1].shape or len(infos[0].shape) != 4:
        raise StartupError(f"model {file.path}: tensors {' and '.join(PATCHES)} must have one shape of 4 dimensions")
    outputs, channels, height, width = infos[0].shape

    def content() -> NDArray[np.uint8]:
        frames = [_values(file, info).reshape(infos[0].shape) for info in infos]
        return np.stack(frames, axis=2).reshape(-1).view(np.uint8)

    return Stored(names.of(PATCHES[0]) or PATCHES[0], (outputs, channels, 2, height, width), "F32", content)


def _with_colours_last(file: GgufFile, names: _Names) -> Stored:
    """Returns the matrix of patches, [outputs, height * width * 3]."""
    info = _existing(file, PATCHES[0])
    if len(info.shape) != 4 or info.shape[1] != 3:
        raise StartupError(f"model {file.path}: tensor {info.name} must have 3 colours in its 2nd of 4 dimensions")

    def content() -> NDArray[np.uint8]:
        return _values(file, info).reshape(info.shape).transpose(0, 2, 3, 1).reshape(-1).view(np.uint8)

    shape = info.shape[0], math.prod(info.shape[1:])
    return Stored(names.of(info.name) or info.name, shape, "F32", content)


def _values(file: GgufFile, info: TensorInfo) -> NDArray[np.float32]:
    stored = readable(Stored(info.name, info.shape, info.encoding.name, file.raw(info)))
    return to_float32(stored).reshape(-1)


def _existing(file: GgufFile, name: str) -> TensorInfo:
    """Raises StartupError."""
    if name not in file.tensors:
        raise StartupError(f"model {file.path}: tensor '{name}' is missing; download the file again")
    return file.tensors[name]
