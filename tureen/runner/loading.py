"""From a model's files to the weights that its decoder wants, checked. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.log import Progress
from tureen.models.config import ModelConfig
from tureen.registry import find_model
from tureen.weights.source import ModelSource
from tureen.weights.stored import Stored, iter_stored

GIB = 1 << 30
DUMMY_SEED = 0
DUMMY_DEVIATION = 0.02


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    """What `model_config(source)` says of the decoder. Raises StartupError naming what is not understood."""
    module = find_model((hf.get("architectures") or [""])[0])
    text = hf.get("text_config", {})  # models with more parts than a decoder keep its config there
    config: ModelConfig = module.parse({**hf, **text})
    return config


def require_memory(needed: int, form: str, device: DeviceInfo) -> None:
    """Raises StartupError when the device has less than the `needed` bytes of weights; `form`: the type they take."""
    free = device.free_bytes()
    if needed > free:
        raise StartupError(
            f"the weights need {needed / GIB:.2f} GiB in {form}, but {device.name} has {free / GIB:.2f} GiB free; "
            "free memory, choose a smaller --model-path, or a smaller --dtype",
            field="model_path",
        )


def weights(
    source: ModelSource, hf: Mapping[str, Any], config: ModelConfig, *, load_format: str, progress: Progress
) -> Iterator[Stored]:
    """Each of `config.weights()` once, in any order: from the model's files, or random ones."""
    if load_format == "dummy":
        return _random_weights(config)
    return wanted_weights(config, iter_stored(source, hf), progress)


def wanted_weights(config: ModelConfig, found: Iterable[Stored], progress: Progress) -> Iterator[Stored]:
    """Those of the weights found that the config wants, each once; values of norms are what multiplies.

    Raises StartupError naming weights that are missing, unknown or misshapen: the missing ones after the last.
    """
    wanted = config.weights()
    total = len(wanted)
    for stored in found:
        shape = wanted.pop(stored.name, None)
        if shape is None:
            if config.tie_embeddings and stored.name == "lm_head.weight":
                continue
            raise StartupError(
                f"the model has a weight that its architecture does not: {stored.name}; is config.json its own?"
            )
        if shape != stored.shape:
            raise StartupError(
                f"weight {stored.name} has shape {list(stored.shape)}, config.json says {list(shape)}; the files do "
                "not belong together"
            )
        is_less_one = config.unit_offset_norm and stored.name.endswith("norm.weight")
        yield stored._replace(offset=stored.offset + 1) if is_less_one else stored
        progress("load weights", total - len(wanted), total)
    if wanted:
        missing = ", ".join(list(wanted)[:3])
        raise StartupError(f"the model lacks {len(wanted)} weights: {missing}{', …' if len(wanted) > 3 else ''}")


def _random_weights(config: ModelConfig) -> Iterator[Stored]:
    """The same at every start; norms multiply by 1."""
    generator = np.random.default_rng(DUMMY_SEED)
    for name, shape in config.weights().items():
        values = np.ones(shape, np.float32)
        if not name.endswith("norm.weight"):
            generator.standard_normal(dtype=np.float32, out=values)
            values *= DUMMY_DEVIATION
        yield Stored(name, shape, "F32", values.reshape(-1).view(np.uint8))
