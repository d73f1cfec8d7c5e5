"""Tells what follows from several settings, or from settings and variables of other projects.

Imports: config; msgspec.
Imported by: admin, api_workers, app, build, data_parallel, multi_model, offline, runner, server, serving.
"""

from __future__ import annotations

import os
from typing import get_args

import msgspec

from tureen.config import Config

OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def asks_for_traces(config: Config) -> bool:
    """Says whether --otlp-endpoint or OpenTelemetry's own variables ask for traces.

    Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    if config.otlp_endpoint is not None:
        return True
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter not in ("", "otlp") or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(exporter) or any(map(os.environ.get, OTLP_ENDPOINTS))


def is_alone(config: Config) -> bool:
    """Says whether one engine serves the model, and no other will."""
    return config.replicas == 1 and (config.max_replicas or 1) == 1 and not config.prefill_replicas


def has_ranks(config: Config) -> bool:
    """Says whether several processes compute one model."""
    return config.tensor_parallel_size > 1 or config.pipeline_parallel_size > 1


class WrittenAdapter(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename=lambda name: f"lora_{name}".replace("lora_pin", "pin"),
):
    """An adapter of --lora-paths in the JSON of SGLang's flag, whose keys begin with `lora_`."""

    name: str
    path: str
    pinned: bool = False  # no adapter is evicted here


def adapter_of(setting: str) -> tuple[str, str]:
    """Return the name and the path of an adapter in --lora-paths: NAME=PATH, PATH or a JSON object; "" for what is
    missing."""
    if setting.startswith("{"):
        try:
            written = msgspec.json.decode(setting, type=WrittenAdapter)
        except msgspec.MsgspecError:
            return "", ""
        return written.name, written.path
    name, _, path = setting.partition("=") if "=" in setting else (setting, "=", setting)
    return name, path


def secret_fields() -> list[str]:
    """Return the names of settings that are never shown."""
    fields = msgspec.structs.fields(Config)
    return [field.name for field in fields if get_args(field.type)[1].extra["secret"]]


def without_secrets(config: Config) -> Config:
    """Return the settings without API keys, for an engine on another machine, which needs none."""
    return msgspec.structs.replace(config, **dict.fromkeys(secret_fields()), api_key_file=None)
