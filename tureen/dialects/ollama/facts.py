"""Describes models in Ollama's form: size, format, number of parameters, capabilities."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from tureen.contract.types import EngineInfo
from tureen.dialects.ollama.conversation import DEFAULTS
from tureen.requests.model_field import LATEST
from tureen.requests.state import ServerState

BILLION, MILLION, THOUSAND = 10**9, 10**6, 10**3
FORMATS = (".gguf", ".safetensors", ".onnx")
WEIGHTS = (*FORMATS, ".bin")


def model_card(name: str, started: str, state: ServerState) -> dict[str, Any]:
    """Returns a model's entry in `/api/tags`. Its digest changes with the model and the version of its weights.

    `started`: the time in ISO 8601 for a model whose files cannot be looked at.
    """
    info, config = state.context.info, state.context.config
    identity = f"{name}\n{info.model_name}\n{config.weight_version}"
    card = named_card(name, changed_at(info) or started, identity)
    return card | {"size": size_of(info), "details": details(name, state)}


def named_card(name: str, modified: str, identity: str) -> dict[str, Any]:
    """Returns what is known of a model that was never loaded."""
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": 0,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
    }


def running_card(card: dict[str, Any], state: ServerState) -> dict[str, Any]:
    """Returns a loaded model's entry in `/api/ps`, without its time. `card`: its entry in `/api/tags`."""
    is_on_gpu = state.context.info.device.startswith("cuda")
    return card | {"size_vram": card["size"] if is_on_gpu else 0, "context_length": state.context.capacity}


def size_of(info: EngineInfo) -> int:
    """Returns the bytes of a model's files."""
    return sum(size for _, size, _ in info.files)


def changed_at(info: EngineInfo) -> str | None:
    """Returns the time in ISO 8601 at which a file of the model's weights was changed last."""
    times = [changed_ns for name, _, changed_ns in info.files if name.endswith(WEIGHTS)]
    return datetime.fromtimestamp(max(times) / 1e9, UTC).isoformat().replace("+00:00", "Z") if times else None


def details(name: str, state: ServerState) -> dict[str, Any]:
    """Returns the `details` of a model, or of one of its adapters."""
    info = state.context.info
    suffixes = [suffix for suffix in FORMATS if any(file.endswith(suffix) for file, _, _ in info.files)]
    return {
        "parent_model": info.model_name if name in state.adapters else "",
        "format": suffixes[0].removeprefix(".") if suffixes else "",
        "family": info.model_type,
        "families": [info.model_type],
        "parameter_size": in_short(info.num_parameters),
        "quantization_level": info.quantization or info.dtype,
    }


def in_short(count: int) -> str:
    """Returns a number of parameters as Ollama writes it, such as 8.0B; "" for 0."""
    if count >= BILLION:
        return f"{count / BILLION:.1f}B"
    if count >= MILLION:
        return f"{count / MILLION:.2f}M"
    return f"{count / THOUSAND:.2f}K" if count >= THOUSAND else str(count or "")


def capabilities(state: ServerState) -> list[str]:
    """Returns what the model can do, by Ollama's names."""
    context = state.context
    if context.info.kind != "generator":
        return ["embedding"] if context.info.kind == "embedder" else []
    can = {
        "completion": True,
        "tools": context.tool_format is not None,
        "vision": state.media is not None,
        "thinking": context.reasoning_format is not None,
    }
    return [name for name, is_there in can.items() if is_there]


def shown(name: str, started: str, state: ServerState) -> dict[str, Any]:
    """Returns the answer of `/api/show`."""
    context, info = state.context, state.context.info
    kind = info.model_type
    server, model = context.defaults
    defaults = DEFAULTS | model | server
    templates = context.chat_templates
    model_info = {
        "general.architecture": kind,
        "general.parameter_count": info.num_parameters or None,
        f"{kind}.context_length": context.capacity,
        f"{kind}.embedding_length": info.hidden_size,
        f"{kind}.vocab_size": info.vocab_size,
    }
    return {
        "modelfile": f"FROM {info.model_name}",
        "parameters": "\n".join(f"{key} {value}" for key, value in defaults.items() if value is not None),
        "template": "" if isinstance(templates, str) else templates.plain.source,
        "details": details(name.removesuffix(f":{LATEST}"), state),
        "model_info": {key: value for key, value in model_info.items() if value is not None},
        "capabilities": capabilities(state),
        "modified_at": changed_at(info) or started,
    }
