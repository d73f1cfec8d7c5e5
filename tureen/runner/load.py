"""Chooses the forward pass that runs a model: native kernels, torch or transformers."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from tureen.attention.choice import NATIVE
from tureen.config import Config
from tureen.config_facts import has_ranks
from tureen.devices.base import DeviceInfo, resolve_device
from tureen.errors import StartupError
from tureen.log import Progress, get_logger, no_progress
from tureen.media.families import is_family, sees, why_blind
from tureen.runner.backend import native_fault, uses_native, uses_ranks
from tureen.runner.heads import layers_of
from tureen.runner.kv_pool import NO_DRAFT, DraftNeed
from tureen.runner.model_runner import ModelRunner
from tureen.weights import gguf_widen
from tureen.weights.source import ModelSource, model_config

if TYPE_CHECKING:
    from tureen.runner.encoder import Encoder
    from tureen.runner.shared_weights import SharedWeights

log = get_logger("runner")


def load_runner(
    source: ModelSource,
    config: Config,
    *,
    progress: Progress = no_progress,
    shared: SharedWeights | None = None,
    draft: DraftNeed = NO_DRAFT,
) -> ModelRunner:
    """Loads a model that is on disk, for the device and the kernels that the settings ask for. `shared`: where native
    kernels find or leave weights that other engines use, too. `draft`: the memory to leave for a draft model. Raises
    StartupError."""
    device = resolve_device(config.device, config.num_threads)
    if uses_ranks(config):
        _refuse_beside_ranks(config)
    if config.model_impl == "transformers":
        log.warning("--model-impl transformers: the slow path; tureen models lists the architectures with a fast one")
        return _load("tureen.runner.transformers_forward", source, config, device, progress)
    if source.gguf is not None and (note := gguf_widen.note(source.gguf.tensors.values())):
        log.info("%s", note)
    encoder = _load_encoder(source, config, device, progress)
    if uses_ranks(config):
        runner = _load("tureen.runner.ranks", source, config, device, progress)
    elif uses_native(config, device):
        runner = _load("tureen.runner.native", source, config, device, progress, shared, draft)
    else:
        if device.type == "cpu" and config.kernels != "torch":
            fault = native_fault(config, device)
            log.warning("computing with torch, several times slower than with native kernels: %s", fault)
        runner = _load("tureen.runner.torch_forward", source, config, device, progress)
    runner.encoder = encoder
    runner.head = layers_of(source, runner.capacity().hidden_size)
    return runner


def _load_encoder(source: ModelSource, config: Config, device: DeviceInfo, progress: Progress) -> Encoder | None:
    """Returns None for a model that takes no pictures."""
    hf = model_config(source)
    if source.mmproj.note:
        log.log(logging.WARNING if source.mmproj.is_warning else logging.INFO, "%s", source.mmproj.note)
    if not sees(hf, config):
        if is_family(hf) and not config.language_model_only:
            log.warning("%s takes text only here: %s", source.name, why_blind())
        return None
    from tureen.runner.encoder import load_encoder  # noqa: PLC0415 - only for models that see

    return load_encoder(source, hf, config, device, progress)


def _load(name: str, *parts: Any) -> ModelRunner:
    runner: ModelRunner = importlib.import_module(name).load_runner(*parts)
    return runner


def _refuse_beside_ranks(config: Config) -> None:
    """Raises StartupError for a setting that does not go with ranks, or with their order."""
    has_stages = config.pipeline_parallel_size > 1
    ranks = f"--tensor-parallel-size {config.tensor_parallel_size}" if has_ranks(config) else "--kernels tree"
    ranks = f"--pipeline-parallel-size {config.pipeline_parallel_size}" if has_stages else ranks
    for field, is_there, why in (
        ("tensor_parallel_size", has_stages and config.tensor_parallel_size > 1, "a rank has some of the layers whole"),
        ("kernels", has_stages and config.kernels == "tree", "that is the order of --tensor-parallel-size"),
        ("kernels", config.kernels == "native", "the native kernels compute in one process"),
        ("attention_backend", config.attention_backend == NATIVE, "it belongs to the native kernels"),
        ("model_impl", config.model_impl == "transformers", "--model-impl transformers cannot be split"),
        ("kv_disk", config.kv_disk is not None, "each rank has a part of every page"),
        ("engine", has_ranks(config) and config.engine == "thread", "the engine ends with a rank; a thread cannot"),
    ):
        if is_there:
            flag = f"--{field.replace('_', '-')} {getattr(config, field)}"
            raise StartupError(f"{flag} with {ranks}: {why}; leave one of the two out", field=field)
