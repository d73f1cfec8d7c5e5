"""A model's shape, read from the dictionary that Hugging Face checkpoints keep in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tureen.errors import StartupError, echo
from tureen.layers.activation import GATED
from tureen.layers.rotary import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is made of. `windows` and `ropes` have one entry a layer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_len: int  # as trained
    activation: str
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unit_offset_norm: bool = False  # norms are stored as weight - 1
    embedding_scale: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def common(hf: Mapping[str, Any]) -> ModelConfig:
    """What all architectures read alike: no bias, no window, one rope. Raises StartupError naming the key at fault."""
    num_heads, hidden_size = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    num_kv_heads = integer(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise _fault("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = integer(hf, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise _fault("head_dim", f"{head_dim} is odd")
    num_layers = integer(hf, "num_hidden_layers")
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if activation not in GATED:
        raise _fault("hidden_act", f"{echo(activation)} is not supported; known: {', '.join(GATED)}")
    return ModelConfig(
        architecture=(hf.get("architectures") or [""])[0],
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(hf, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=number(hf, "rms_norm_eps", 1e-6),
        context_len=integer(hf, "max_position_embeddings", 2048),
        activation=activation,
        attention_scale=head_dim**-0.5,
        windows=(None,) * num_layers,
        ropes=(rope(hf, hf.get("rope_parameters") or hf.get("rope_scaling") or {}),) * num_layers,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count of at least 1. A missing or null key takes the default, if there is one."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _fault(key, "is missing" if value is None else f"must be a positive integer, got {echo(value)}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """As `integer`, for any positive number."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _fault(key, "is missing" if value is None else f"must be a positive number, got {echo(value)}")
    return float(value)


def rope(hf: Mapping[str, Any], parameters: Mapping[str, Any], *, theta: float | None = None) -> RopeConfig:
    """`parameters`: the config's rope_parameters or, in older ones, rope_scaling beside rope_theta."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise _fault("rope_scaling", f"{echo(kind)} is not supported; known: {', '.join(ROPE_KINDS)}")
    if number({**hf, **parameters}, "partial_rotary_factor", 1.0) != 1.0:
        raise _fault("partial_rotary_factor", "only 1.0 is supported")
    base = number({"rope_theta": theta or hf.get("rope_theta"), **parameters}, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(base)
    if kind == "linear":
        return RopeConfig(base, kind, factor=number(parameters, "factor"))
    return RopeConfig(
        base,
        kind,
        factor=number(parameters, "factor"),
        low_freq_factor=number(parameters, "low_freq_factor"),
        high_freq_factor=number(parameters, "high_freq_factor"),
        original_context=integer(parameters, "original_max_position_embeddings"),
    )


def sliding_windows(hf: Mapping[str, Any], num_layers: int, slides: list[bool]) -> tuple[int | None, ...]:
    """A window or None for each layer: by `layer_types` where the config has it, else where `slides` says so."""
    kinds = hf.get("layer_types") or ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    unknown = {kind for kind in kinds if kind not in ("sliding_attention", "full_attention")}
    if unknown or len(kinds) != num_layers:
        raise _fault(
            "layer_types",
            f"must say sliding_attention or full_attention for each of {num_layers} layers, got {echo(kinds)}",
        )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = integer(hf, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def refuse(hf: Mapping[str, Any], **allowed: object) -> None:
    """Raises StartupError for a key whose value, if present and not null, is another than the one allowed."""
    for key, value in allowed.items():
        if hf.get(key) not in (None, value):
            raise _fault(key, f"{echo(hf[key])} is not supported; only {echo(value)} is")


def _fault(key: str, what: str) -> StartupError:
    return StartupError(f"config.json: {key}: {what}", field=key)
