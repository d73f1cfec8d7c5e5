"""Checks and loads a draft model, which guesses tokens for another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tureen.config import Config
from tureen.config_facts import has_ranks
from tureen.devices.base import resolve_device
from tureen.errors import StartupError
from tureen.log import Progress, get_logger
from tureen.runner import loading
from tureen.runner.backend import native_fault
from tureen.runner.kinds import model_kind
from tureen.runner.kv_pool import DraftNeed, state_bytes
from tureen.weights.source import ModelSource, model_config

if TYPE_CHECKING:
    from tureen.runner.model_runner import ModelRunner


class DraftOnDisk(NamedTuple):
    """A draft model found on disk."""

    source: ModelSource
    settings: Config
    need: DraftNeed


KINDS = {"embedder": "an embedding model", "classifier": "a classifier"}

log = get_logger("runner")


def draft_config(config: Config) -> Config:
    """Returns the settings of the draft model: the served model's, without those that only that model has."""
    return msgspec.structs.replace(
        config,
        model_path=config.draft_model or "",
        draft_model=None,
        revision=None,
        tokenizer_path=None,
        chat_template=None,
        mmproj=None,
        lora_paths=(),
        language_model_only=True,
        enable_custom_logit_processor=False,
        logit_processor=(),
        activations="auto",
        context_length=None,
    )


def check_settings(config: Config) -> None:
    """Raises StartupError for a setting that cannot be combined with --draft-model."""
    for is_set, flag in (
        (not config.speculative, "--no-speculative"),
        (has_ranks(config), "--tensor-parallel-size and --pipeline-parallel-size above 1"),
        (config.kernels in ("torch", "tree"), f"--kernels {config.kernels}"),
        (config.model_impl == "transformers", "--model-impl transformers"),
    ):
        if is_set:
            raise refused(config, f"it cannot be combined with {flag}; remove one of the two")
    if fault := native_fault(config, resolve_device(config.device, config.num_threads)):
        raise refused(config, f"draft models need the native kernels: {fault}")


def check_models(
    config: Config, models: tuple[ModelSource, ModelSource], vocabularies: tuple[list[bytes], list[bytes]]
) -> None:
    """Raises StartupError unless the second model, with the second vocabulary, can guess tokens of the first."""
    for source, role in zip(models, ("the served model", "the draft model"), strict=True):
        kind = model_kind(source)
        if kind != "generator":
            raise refused(config, f"{role}, {source.name}, is {KINDS[kind]}; both models must generate text")
        if state_bytes(loading.describe(model_config(source))):
            raise refused(
                config,
                f"{role}, {source.name}, has recurrent layers. Their state cannot be rolled back after a wrong guess; "
                "both models must have attention in every layer",
            )
    own, other = vocabularies
    if own != other:
        common = min(len(own), len(other))
        first = next((at for at in range(common) if own[at] != other[at]), common)
        raise refused(
            config,
            f"the vocabularies of {models[0].name} ({len(own)} tokens) and {models[1].name} ({len(other)} tokens) "
            f"differ from token {first} on; choose a smaller model of the same family, or leave --draft-model out",
        )


def need_of(source: ModelSource, config: Config) -> DraftNeed:
    """Returns the bytes of the draft model. Reads headers only. Raises StartupError."""
    from tureen.kernels.cpu.native import require  # noqa: PLC0415 - few servers have a draft model
    from tureen.runner import native  # noqa: PLC0415

    kernels, model = require(), loading.describe(model_config(source))
    kv_per_token = native.bytes_of_kv(kernels, config, model).together().in_pages
    return DraftNeed(native.weight_bytes(kernels, source, config, model), kv_per_token)


def load_draft(
    source: ModelSource, config: Config, target: ModelRunner, need: DraftNeed, progress: Progress
) -> ModelRunner:
    """Loads the draft model of the model that `target` runs. Raises StartupError."""
    from tureen.runner import native  # noqa: PLC0415 - few servers have a draft model

    runner = native.load_draft(source, config, resolve_device(config.device, config.num_threads), progress, target)
    bounds = target.capacity()
    log.info(
        "that memory includes the draft model %s: %d MiB of weights and up to %d MiB of KV cache",
        source.name, need.weights >> 20, need.kv_per_token * bounds.num_pages * bounds.page_size >> 20,
    )  # fmt: skip
    return runner


def refused(config: Config, why: str) -> StartupError:
    """Returns the error of a draft model that cannot be used."""
    return StartupError(f"--draft-model {config.draft_model}: {why}", field="draft_model")
