"""Build a model and fill it with weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.log import Progress
from tureen.models.base import IGNORED, RENAMES, DecoderModel
from tureen.models.config import ModelConfig

GIB = 1 << 30
DUMMY_SEED = 0
DUMMY_DEVIATION = 0.02


def flatten(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: models with more parts keep it under text_config."""
    return {**hf, **hf.get("text_config", {})}


def require_memory(module: ModuleType, config: ModelConfig, dtype: torch.dtype, device: DeviceInfo) -> int:
    """Bytes the weights will take. Raises StartupError when the device has less; allocates nothing."""
    with torch.device("meta"):
        model: DecoderModel = module.build(config, dtype)
    needed = sum(tensor.nbytes for tensor in model.weights().values())
    if config.tie_embeddings and device.type == "cpu":
        needed += config.vocab_size * config.hidden_size * dtype.itemsize  # the head keeps its own layout
    free = device.free_bytes()
    if needed > free:
        name = str(dtype).removeprefix("torch.")
        raise StartupError(
            f"the weights need {needed / GIB:.2f} GiB in {name}, but {device.name} has {free / GIB:.2f} GiB free; "
            "free memory, choose a smaller --model-path, or a smaller --dtype",
            field="model_path",
        )
    return needed


def fill(model: DecoderModel, tensors: Iterable[tuple[str, Tensor]], progress: Progress) -> None:
    """Copy each tensor to its place. Raises StartupError naming weights that are missing, unknown or misshapen."""
    wanted = model.weights()
    total = len(wanted)
    for name, tensor in tensors:
        name = _local_name(name)
        place = wanted.pop(name, None)
        if place is None:
            if name.startswith(IGNORED) or name.endswith("rotary_emb.inv_freq") or _is_tied_head(model, name):
                continue
            raise StartupError(
                f"the model has a weight that its architecture does not: {name}; is config.json its own?"
            )
        if place.shape != tensor.shape:
            raise StartupError(
                f"weight {name} has shape {list(tensor.shape)}, config.json says {list(place.shape)}; the files do not "
                "belong together"
            )
        place.copy_(tensor)
        progress("load weights", total - len(wanted), total)
    if wanted:
        missing = ", ".join(list(wanted)[:3])
        raise StartupError(f"the model lacks {len(wanted)} weights: {missing}{', …' if len(wanted) > 3 else ''}")


def fill_randomly(model: DecoderModel, device: torch.device) -> None:
    """Random weights, the same at every start; norms get ones."""
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name, place in model.weights().items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        else:
            place.normal_(std=DUMMY_DEVIATION, generator=generator)


def _local_name(name: str) -> str:
    for prefix, ours in RENAMES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _is_tied_head(model: DecoderModel, name: str) -> bool:
    return model.config.tie_embeddings and name == "lm_head.weight"
