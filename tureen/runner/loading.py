"""Reads a model's files into the weights that its decoder needs, checked. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError, echo
from tureen.log import Progress
from tureen.models.config import STACKED, ModelConfig
from tureen.registry import find_model, find_text_model
from tureen.weights.source import ModelSource
from tureen.weights.stored import Stored, is_offset, iter_stored, local_name, to_float32

GIB = 1 << 30
FEWER_BITS = "fewer bits (--quantization int8 or int4, a smaller --dtype)"
CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures that score texts."""
SCORE = "score."
"""Beginning of the names of the weights that turn a decoder's last state into scores."""
GUESSING = ("mtp.", "model.mtp_")
"""Beginnings of the names of weights that predict further tokens, which are not read."""
DUMMY_SEED = 0
IS_FACTOR = re.compile(r"norm(_\d)?\.weight$|\.layer_scalar$")
"""Matches weights that scale their input. Random weights set them to 1."""
DUMMY_DEVIATION = 0.02
MOST_DRAWN = (1 << 20) - 3  # random weights of a matrix, which larger ones repeat: 8 billion take minutes to draw


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a checkpoint's config into the description of its decoder. Raises StartupError naming what is not
    understood."""
    module, text = _decoder_of(hf)
    config: ModelConfig = module.parse(text)
    return config


def _decoder_of(hf: Mapping[str, Any]) -> tuple[ModuleType, Mapping[str, Any]]:
    """Returns the file of the decoder that the model is, or has inside, and the config that it reads."""
    module = find_model(architecture_of(hf))
    if not hasattr(module, "text_config"):
        inner = hf.get("text_config") or {}
        if not isinstance(inner, Mapping):
            raise StartupError(f"config.json: text_config: must be an object, got {echo(inner)}", field="text_config")
        tied = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}  # the larger model has the head
        return module, {**hf, **inner, **tied}
    text = module.text_config(hf)
    decoder = find_text_model(text["model_type"])
    defaults = decoder.TEXT_DEFAULTS[text["model_type"]]
    return decoder, {**defaults, **text, "architectures": defaults["architectures"]}


def architecture_of(hf: Mapping[str, Any]) -> str:
    """Returns the first architecture that config.json names; "" where it names none. Raises StartupError."""
    names = hf.get("architectures") or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise StartupError(f"config.json: architectures: must be a list of names, got {echo(names)}")
    return names[0]


def require_memory(needed: int, form: str, device: DeviceInfo, advice: str = FEWER_BITS) -> None:
    """Raises StartupError when the device has less than the `needed` bytes of weights. For the message: `form`, their
    type, and `advice`, what may help."""
    free = device.free_bytes()
    if needed > free:
        raise StartupError(
            f"the weights need {needed / GIB:.2f} GiB in {form}, but {device.name} has {free / GIB:.2f} GiB free; "
            f"free memory, take a smaller model, or {advice}",
            field="model_path",
        )


def weights(
    source: ModelSource, hf: Mapping[str, Any], config: ModelConfig, *, load_format: str, progress: Progress
) -> Iterator[Stored]:
    """Yields each of `config.weights()` once, in any order: from the model's files, or random for load_format
    "dummy"."""
    if load_format == "dummy":
        return random_weights(config.weights())
    return wanted_weights(config, renamed(iter_stored(source, hf), hf, config), progress)


def wanted_weights(config: ModelConfig, tensors: Iterable[Stored], progress: Progress) -> Iterator[Stored]:
    """Yields the weights that the config needs, each once; values of norms are the factors themselves.

    Raises StartupError naming weights that are missing, unknown or misshapen: the missing ones after the last.
    """
    unread = config.weights()
    total = len(unread)
    shapes = dict(unread)
    extra = unread_parts(config)
    for stored in unstacked((tensor for tensor in tensors if not tensor.name.startswith(extra)), shapes):
        shape = unread.pop(stored.name, None)
        if shape is not None and is_same_shape(shape, stored.shape):
            stored = stored._replace(shape=shape)
        if shape is None:
            if is_not_needed(stored, config):
                continue
            raise StartupError(
                f"the model has a weight that its architecture does not: {stored.name}; is config.json its own?"
            )
        if shape != stored.shape:
            raise StartupError(
                f"weight {stored.name} has shape {list(stored.shape)}, config.json says {list(shape)}; the files do "
                "not belong together"
            )
        is_less_one = config.unit_offset_norm and is_offset(stored.name)
        yield stored._replace(offset=stored.offset + 1) if is_less_one else stored
        progress("load weights", total - len(unread), total)
    if unread:
        missing = ", ".join(list(unread)[:3])
        raise StartupError(f"the model lacks {len(unread)} weights: {missing}{', …' if len(unread) > 3 else ''}")


def unread_parts(config: ModelConfig) -> tuple[str, ...]:
    """Returns the beginnings of the names of weights that predict further tokens, or belong to layers that are not
    computed."""
    return (*GUESSING, *(f"model.layers.{config.num_layers + index}." for index in range(config.extra_layers)))


def is_not_needed(stored: Stored, config: ModelConfig) -> bool:
    """Returns whether a weight that the config does not have can be left out."""
    if stored.name == "lm_head.weight":
        return config.tie_embeddings
    if config.architecture.endswith(CLASSIFIER) and stored.name.startswith(SCORE):  # see runner/heads.py
        return True
    return stored.name.endswith(".bias") and not to_float32(stored).any()  # AutoGPTQ gives one to every matrix


def is_same_shape(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether two shapes are equal but for dimensions of one."""
    return [size for size in shape if size != 1] == [size for size in other if size != 1]


def renamed(tensors: Iterable[Stored], hf: Mapping[str, Any], config: ModelConfig) -> Iterator[Stored]:
    """Yields the same weights by the names that `ModelConfig.weights` has for them."""
    renames, apart = _renames(hf), getattr(_decoder_of(hf)[0], "apart", None)
    for stored in tensors:
        name = replaced(stored.name, renames)
        stored = stored if name == stored.name else stored._replace(name=name)
        if apart is None:
            yield stored
        else:
            yield from apart(stored, config)


def our_name(name: str, hf: Mapping[str, Any]) -> str:
    """Returns the name that `ModelConfig.weights` has for a checkpoint's weight."""
    return replaced(local_name(name), _renames(hf))


def _renames(hf: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Parts of names in the model's checkpoints -> what they are called here."""
    renames: tuple[tuple[str, str], ...] = getattr(_decoder_of(hf)[0], "RENAMES", ())
    return renames


def replaced(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Returns the name with each of these parts replaced, one after another."""
    for part, ours in renames:
        name = name.replace(part, ours)
    return name


def unstacked(tensors: Iterable[Stored], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Stored]:
    """Yields the same weights, those that stand in one matrix one by one; `shapes`: those of the weights that are
    wanted."""
    for stored in tensors:
        *before, module, kind = stored.name.rsplit(".", 2)
        names = [".".join((*before, part, kind)) for part in STACKED.get(module, ())]
        if len(stored.shape) == 3 and ".experts." in stored.name:
            yield from unstacked(_apart(stored), shapes)
        elif names and all(name in shapes for name in names):
            yield from _split(stored, names, shapes)
        else:
            yield stored


def _apart(stored: Stored) -> Iterator[Stored]:
    """Yields the matrices of all experts, which the file keeps in one: `experts.X` becomes `experts.N.X`."""
    whole = cache(lambda: stored.data.reshape(stored.shape[0], -1))  # read once, on first use
    for index in range(stored.shape[0]):
        name = stored.name.replace(".experts.", f".experts.{index}.")
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        content = partial(_part, whole, index, index + 1)
        yield stored._replace(name=name, shape=stored.shape[1:], content=content)


def _split(stored: Stored, names: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Stored]:
    """Yields the parts of a stacked matrix. Raises StartupError when it does not have the rows of all."""
    heights = [shapes[name][0] for name in names]
    if sum(heights) != stored.shape[0]:
        raise StartupError(
            f"weight {stored.name} has {stored.shape[0]} rows, config.json says {sum(heights)}; the files do not "
            "belong together"
        )
    rows = cache(lambda: stored.data.reshape(stored.shape[0], -1))  # read once, and not before it is asked for
    first = 0
    for name, height in zip(names, heights, strict=True):
        part = partial(_part, rows, first, first + height)
        yield stored._replace(name=name, shape=(height, *stored.shape[1:]), content=part)
        first += height


def _part(rows: Callable[[], NDArray[np.uint8]], first: int, end: int) -> NDArray[np.uint8]:
    return rows()[first:end].reshape(-1)


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Stored]:
    """Yields random weights of these shapes, the same at every start; norms multiply by 1."""
    generator = np.random.default_rng(DUMMY_SEED)
    for name, shape in shapes.items():
        size = math.prod(shape)
        values = np.ones(min(size, MOST_DRAWN), np.float32)
        if not IS_FACTOR.search(name):
            generator.standard_normal(dtype=np.float32, out=values)
            values *= DUMMY_DEVIATION
        yield Stored(name, shape, "F32", np.resize(values, size).view(np.uint8))
