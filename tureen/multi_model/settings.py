"""Makes the settings of each model of a server that has several."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, get_args

import msgspec

from tureen.config import Config, cache_dir, fields
from tureen.errors import StartupError, echo
from tureen.fetching.names import parse
from tureen.fetching.on_disk import known_as
from tureen.log import get_logger
from tureen.runner.embedder import NOT_FOR_EMBEDDINGS
from tureen.sandbox.budget import helper_bytes
from tureen.weights.source import resolve_model

log = get_logger("fleet")

OWN_GROUPS = ("model", "sampling", "scheduling")
"""Groups of settings that a model may have of its own."""
OWN_OTHERS = ("engine", "watchdog_timeout_s", "freeze_grace_s")
OF_THE_SERVER = ("models", "models_memory", "helper_memory_mib", "download_dir", "draft_model")


def own_settings() -> list[str]:
    """Returns the names of the settings that a model may have of its own; the others are the server's."""
    return [
        field.name
        for field in fields()
        if field.name not in OF_THE_SERVER
        and (get_args(field.type)[1].extra["group"] in OWN_GROUPS or field.name in OWN_OTHERS)
    ]


def each_model(config: Config) -> list[Config]:
    """Returns the settings of each model of `config.models`: its own over the server's. The first is the default model.

    Raises StartupError naming the model and the setting.
    """
    if config.replicas != 1 or config.prefill_replicas:
        raise StartupError(
            f"{len(config.models)} models with --replicas or --prefill-replicas: replicas serve one model; run a "
            "separate server for the model that needs them",
            field="replicas",
        )
    if config.draft_model is not None:
        raise StartupError(
            f"--draft-model {config.draft_model} with {len(config.models)} models: a draft model belongs to one model; "
            "run a separate server for the model that needs it",
            field="draft_model",
        )
    return [one_model(config, table, f"models[{index}]") for index, table in enumerate(config.models)]


def one_model(config: Config, table: Mapping[str, Any], where: str) -> Config:
    """Returns the settings of one model: its own, in `table`, over the server's. Raises StartupError, which begins with
    `where`."""
    allowed, own = set(own_settings()), own_names(table)
    for name in own:
        if name not in allowed:
            known = "it is a setting of the server" if name in Config.__struct_fields__ else "there is no such setting"
            raise StartupError(f"{where}: {echo(name)} is not allowed there: {known}; see docs/several-models.md")
    if not isinstance(own.get("model_path"), str):
        raise StartupError(f"{where}: model_path is missing; it says which model")
    base: dict[str, Any] = msgspec.structs.asdict(config) | {
        "models": (),
        "model_path": own["model_path"],
        "served_model_name": None,
        "engine": "process" if config.engine == "auto" else config.engine,
        "helper_memory_mib": max(1, (helper_bytes(config) >> 20) // len(config.models)),
    }
    try:
        return msgspec.convert(base | own, Config, strict=False)
    except msgspec.ValidationError as error:
        raise StartupError(f"{where}: {str(error).replace('`$.', '`')}") from None


def own_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a [[models]] table by the names that they have in Config."""
    return {name.replace("-", "_"): value for name, value in table.items()}


def for_embeddings(config: Config, own: Container[str]) -> Config:
    """Returns the settings of a model that makes embeddings: without those of the server's that only models which write
    have. `own`: names of the settings that the model itself was given; these are left for the start to refuse."""
    at_default = Config()
    foreign = {
        name: getattr(at_default, name)
        for name in (*NOT_FOR_EMBEDDINGS, "context_length")
        if name not in own and getattr(config, name) != getattr(at_default, name)
    }
    if foreign:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        log.info("model %s is an embedding model: %s of the server does not apply to it", name_of(config), flags)
    return msgspec.structs.replace(config, **foreign)


def name_of(config: Config) -> str:
    """Returns the name of a model, without fetching it: --served-model-name, or the name that every command has. Raises
    StartupError for a path at which there is no model."""
    if config.served_model_name is not None:
        return config.served_model_name
    if parse(config.model_path).kind == "path":
        return resolve_model(config.model_path, cache_dir=cache_dir(config)).name
    return known_as(config.model_path, config)


def check_names(names: Sequence[str]) -> None:
    """Raises StartupError where two models have the same name."""
    for index, name in enumerate(names):
        if name.casefold() in (other.casefold() for other in names[:index]):
            raise StartupError(
                f"two models are called {name}; give one another name: served_model_name in its [[models]] table"
            )
