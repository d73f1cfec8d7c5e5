"""The description of a decoder, read from the dictionary that Hugging Face checkpoints keep in config.json. No
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tureen.contract.types import RopeFactors
from tureen.errors import StartupError, echo
from tureen.layers.rope import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "longrope")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some checkpoints keep in one, their rows one after another."""


class Experts(msgspec.Struct, frozen=True):
    """The experts of a layer's mlp, of which each token uses a few (arXiv:2101.03961, arXiv:2401.04088).

    The router's softmax over all experts weighs what the chosen ones give.
    """

    count: int
    num_chosen: int
    size: int  # an expert's intermediate size
    is_normalised: bool  # the weights of those chosen are made to sum to 1
    shared_size: int = 0  # intermediate size of one more that every token uses, times sigmoid of a gate; 0 = none


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The complete description of a decoder: every runner builds it from this alone.

    A layer adds attention(norm(x)) to x, then mlp(norm(x)); with `post_norms` another norm follows each of the two
    before its result is added, times `residual_scale`. The mlp is down(activation(gate(x)) * up(x)). `windows` and
    `ropes` have one entry a layer; a window of n lets a token see itself and the n - 1 tokens before it, a rope of None
    leaves q and k as they are. `experts` has one entry a layer too, or none. A softcap of c makes c * tanh(x / c) of x.
    """

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
    ropes: tuple[RopeConfig | None, ...]
    experts: tuple[Experts | None, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of q and k is normalised before the rotation
    post_norms: bool = False
    unit_offset_norm: bool = False  # Hugging Face checkpoints store the norms' weights minus 1
    embedding_scale: float | None = None  # token embeddings are multiplied by it
    residual_scale: float = 1.0
    attention_softcap: float | None = None  # of q · k * attention_scale
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def original_context(self) -> int | None:
        """The longest context of LongRoPE's short factors; None for a model without LongRoPE."""
        lengths = [rope.original_context for rope in self.ropes if rope is not None and rope.kind == "longrope"]
        return min(lengths, default=None)

    @property
    def default_context(self) -> int:
        """The context of a server whose settings name none. With LongRoPE it is that of the short factors."""
        return min(self.context_len, self.original_context or self.context_len)

    def rope_factors(self, context_len: int) -> RopeFactors | None:
        """Returns LongRoPE's list of factors in a server of this context; None for a model without LongRoPE."""
        if self.original_context is None:
            return None
        return "long" if context_len > self.original_context else "short"

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The names of a layer's norms in checkpoints, in the order in which they are applied."""
        mlp = ("pre_feedforward", "post_feedforward") if self.post_norms else ()
        return tuple(f"{name}_layernorm" for name in ("input", "post_attention", *mlp))

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight that the model has, by its Hugging Face name. A matrix is [outputs,
        inputs]."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for index in range(self.num_layers):
            layer = self._layer_weights() | self._mlp_weights(self.experts_of(index))
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def experts_of(self, layer: int) -> Experts | None:
        """Returns the experts of a layer; None where its mlp is a single one."""
        return self.experts[layer] if self.experts else None

    def _layer_weights(self) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in self.layer_norms}
        for name, outputs, inputs, bias in (
            ("self_attn.q_proj", heads, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_heads, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_heads, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, heads, self.out_bias),
        ):
            shapes[f"{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.bias"] = (outputs,)
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return shapes

    def _mlp_weights(self, experts: Experts | None) -> dict[str, tuple[int, ...]]:
        if experts is None:
            shapes = self._gated("mlp", self.intermediate_size)
            if self.mlp_bias:
                shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in tuple(shapes.items())}
            return shapes
        shapes = {"mlp.gate.weight": (experts.count, self.hidden_size)}
        for index in range(experts.count):
            shapes |= self._gated(f"mlp.experts.{index}", experts.size)
        if experts.shared_size:
            shapes |= self._gated("mlp.shared_expert", experts.shared_size)
            shapes["mlp.shared_expert_gate.weight"] = (1, self.hidden_size)
        return shapes

    def _gated(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        return {
            f"{name}.gate_proj.weight": (size, hidden),
            f"{name}.up_proj.weight": (size, hidden),
            f"{name}.down_proj.weight": (hidden, size),
        }


def common(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the settings that all architectures share: no bias, no window, one rope. Raises StartupError naming the key
    at fault."""
    num_heads, hidden_size = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    num_kv_heads = integer(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise _fault("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = integer(hf, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise _fault("head_dim", f"{head_dim} is odd")
    num_layers = integer(hf, "num_hidden_layers")
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise _fault("hidden_act", f"{echo(activation)} is not supported; known: {', '.join(ACTIVATIONS)}")
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
        ropes=(rope(hf, rope_parameters(hf)),) * num_layers,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads a count of at least 1. A missing or null key takes the default, if there is one. Raises StartupError."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _fault(key, "is missing" if value is None else f"must be a positive integer, got {echo(value)}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Reads a key like `integer`, for any positive number."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise _fault(key, "is missing" if value is None else f"must be a positive number, got {echo(value)}")
    return float(value)


def layer_number(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Reads a key like `integer`, for any integer that is not negative."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise _fault(key, f"must be an integer of at least 0, got {echo(value)}")
    return value


def rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rope's settings, by their newer or their older name; {} where there are none."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = hf.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise _fault(key, f"must be an object, got {echo(parameters)}")
    return parameters


def checked(experts: Experts) -> Experts:
    """Returns the experts. Raises StartupError when a token would use more than there are."""
    if experts.num_chosen > experts.count:
        raise _fault("num_experts_per_tok", f"{experts.num_chosen} of {experts.count} experts cannot be used")
    return experts


def sparse_layers(hf: Mapping[str, Any], num_layers: int, experts: Experts) -> tuple[Experts | None, ...]:
    """Returns each layer's experts where Qwen's configs have them: every decoder_sparse_step-th layer but those in
    mlp_only_layers."""
    every = integer(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise _fault("mlp_only_layers", f"must be a list of layers, got {echo(dense)}")
    return tuple(experts if (layer + 1) % every == 0 and layer not in dense else None for layer in range(num_layers))


def optional_number(hf: Mapping[str, Any], key: str) -> float | None:
    """Reads a key like `number`; None where the key is missing or null."""
    return None if hf.get(key) is None else number(hf, key)


def rope(hf: Mapping[str, Any], parameters: Mapping[str, Any], *, theta: float | None = None) -> RopeConfig:
    """Reads a rope's settings. Raises StartupError naming the key at fault.

    parameters: the config's rope_parameters or, in older ones, rope_scaling beside rope_theta. theta: the base
    frequency that holds instead of the config's.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise _fault("rope_scaling", f"{echo(kind)} is not supported; known: {', '.join(ROPE_KINDS)}")
    share = number({**hf, **parameters}, "partial_rotary_factor", 1.0)
    if share > 1:
        raise _fault("partial_rotary_factor", f"must be at most 1, got {share:g}")
    base = number({"rope_theta": theta or hf.get("rope_theta"), **parameters}, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(base, share=share)
    if kind == "linear":
        return RopeConfig(base, kind, share=share, factor=number(parameters, "factor"))
    if kind == "longrope":
        return _longrope(hf, parameters, base, share)
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if low >= high:
        raise _fault("low_freq_factor", f"must be less than high_freq_factor; got {low:g} and {high:g}")
    return RopeConfig(
        base,
        kind,
        share=share,
        factor=number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=integer(parameters, "original_max_position_embeddings"),
    )


def _longrope(hf: Mapping[str, Any], parameters: Mapping[str, Any], base: float, share: float) -> RopeConfig:
    num_heads = integer(hf, "num_attention_heads")
    dim = int(integer(hf, "head_dim", integer(hf, "hidden_size") // num_heads) * share)
    key = "original_max_position_embeddings"
    original = integer({key: hf.get(key) or parameters.get(key)}, key)
    if original < 2:
        raise _fault(key, f"must be at least 2, got {original}")
    stretch = number(parameters, "factor", integer(hf, "max_position_embeddings") / original)
    grown = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeConfig(
        base,
        "longrope",
        share=share,
        original_context=original,
        short_factors=_factors(parameters, "short_factor", dim // 2),
        long_factors=_factors(parameters, "long_factor", dim // 2),
        magnitude=number(parameters, "attention_factor", grown),
    )


def _factors(parameters: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != length:
        raise _fault(f"rope_scaling.{key}", f"must be a list of {length} numbers")
    return tuple(number({key: value}, key) for value in values)


def sliding_windows(hf: Mapping[str, Any], num_layers: int, slides: list[bool]) -> tuple[int | None, ...]:
    """Returns a window or None for each layer: by `layer_types` where the config has it, else where `slides` says
    so."""
    kinds = hf.get("layer_types") or ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise _fault(
            "layer_types",
            f"must say sliding_attention or full_attention for each of {num_layers} layers, got {echo(kinds)}",
        )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = integer(hf, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def refuse(hf: Mapping[str, Any], **allowed: object) -> None:
    """Raises StartupError for a key whose value is present, not null, and other than the one allowed."""
    for key, value in allowed.items():
        if hf.get(key) not in (None, value):
            raise _fault(key, f"{echo(hf[key])} is not supported; only {echo(value)} is")


def _fault(key: str, what: str) -> StartupError:
    return StartupError(f"config.json: {key}: {what}", field=key)
