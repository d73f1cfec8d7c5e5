"""The description of a decoder, read from the dictionary that Hugging Face checkpoints keep in config.json. No
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from tureen.contract.types import RopeFactors
from tureen.errors import StartupError, echo
from tureen.layers.activation_names import ACTIVATIONS, XIELU
from tureen.layers.mixers import Mixer
from tureen.layers.rope import RopeConfig
from tureen.layers.routing import Experts

ROPE_KINDS = ("default", "linear", "llama3", "longrope", "yarn")
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some checkpoints keep in one, their rows one after another."""
EXPERT_NAMES = ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
"""Parts of the names of experts in Mixtral's checkpoints, and others -> our names."""


LAYER_NORMS = {
    "pre": ("input", "post_attention"),
    "post": ("post_attention", "post_feedforward"),
    "both": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "parallel": ("input",),
}
"""The norms of a layer by ModelConfig.norms, in the order in which they are applied."""


class QueryGrowth(msgspec.Struct, frozen=True):
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / every)) (Llama 4, Ministral 3)."""

    beta: float
    every: int


class Multipliers(msgspec.Struct, frozen=True):
    """Factors inside a layer (Falcon-H1)."""

    attention_in: float = 1.0  # of what q, k and v are made from
    attention_out: float = 1.0
    gate: float = 1.0  # of the gate of the mlp
    mlp_out: float = 1.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The complete description of a decoder: every runner builds it from this alone.

    A layer of one part (see `parts`) has one norm, input_layernorm.

    A layer adds attention(x) to x, then mlp(x), each times `residual_scale`. `norms` says where it normalises: before
    the two ("pre"), after them ("post"), both, or once before the two, which then get the same x ("parallel"). The mlp
    is down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate. `windows` and `ropes` have one
    entry a layer; a window of n lets a token see itself and the n - 1 tokens before it, a rope of None leaves q and k
    as they are. `experts` has one entry a layer too, or none. A softcap of c makes c * tanh(x / c) of x.
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
    mixers: tuple[Mixer | None, ...] = ()  # of each layer; None, or no entries: attention
    mixers_beside: bool = False  # a layer with a mixer has attention too, and adds the results of both
    parts: tuple[Literal["both", "mixer", "mlp"], ...] = ()  # of each layer: attention or mixer, mlp; no entries: both
    multipliers: Multipliers = Multipliers()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated_mlp: bool = True
    norms: Literal["pre", "post", "both", "parallel"] = "pre"
    layer_norm: bool = False  # norms subtract the mean (arXiv:1607.06450)
    norm_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""  # q and k are normalised: each head by itself, or all heads together
    qk_norm_last: bool = False  # after the rotation
    has_gate: bool = False  # what each head gives is multiplied by the sigmoid of a gate
    has_sinks: bool = False  # each head has one more score in its softmax, which no value belongs to
    query_growth: QueryGrowth | None = None
    extra_layers: int = 0  # stored after the last layer, to predict further tokens; they are not read
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
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, in the order in which the KV cache has them."""
        return tuple(layer for layer in range(self.num_layers) if self.has_attention(layer))

    @property
    def state_floats(self) -> int:
        """The number of float32 values in the state of one sequence; 0: the model has attention alone."""
        return sum(mixer.state_floats for mixer in self.mixers if mixer is not None)

    def state_start(self, layer: int) -> int:
        """Returns the place of a layer's values in the state of a sequence."""
        return sum(mixer.state_floats for mixer in self.mixers[:layer] if mixer is not None)

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

    def layer_norms(self, layer: int) -> tuple[str, ...]:
        """Returns the names of a layer's norms in checkpoints, in the order in which they are applied."""
        names = LAYER_NORMS[self.norms] if self.part_of(layer) == "both" else ("input",)
        return tuple(f"{name}_layernorm" for name in names)

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight that the model has, by its Hugging Face name. A matrix is [outputs,
        inputs]."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for index in range(self.num_layers):
            layer = self._layer_weights(index)
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes |= self._norm_weights("model.norm", self.hidden_size)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        if self.head_bias:
            shapes["lm_head.bias"] = (self.vocab_size,)
        return shapes

    def _norm_weights(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.{part}": (size,) for part in ("weight", *(("bias",) if self.norm_bias else ()))}

    def experts_of(self, layer: int) -> Experts | None:
        """Returns the experts of a layer; None where its mlp is a single one."""
        return self.experts[layer] if self.experts else None

    def mixer_of(self, layer: int) -> Mixer | None:
        """Returns what a layer has in place of attention; None where it has attention."""
        return self.mixers[layer] if self.mixers else None

    def part_of(self, layer: int) -> Literal["both", "mixer", "mlp"]:
        """Returns what a layer has: attention or a mixer, an mlp, or both."""
        return self.parts[layer] if self.parts else "both"

    def has_attention(self, layer: int) -> bool:
        """Returns whether a layer has attention."""
        return self.part_of(layer) != "mlp" and (self.mixers_beside or self.mixer_of(layer) is None)

    def _layer_weights(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        mixer = self.mixer_of(layer)
        for name in self.layer_norms(layer):
            shapes |= self._norm_weights(name, self.hidden_size)
        if self.has_attention(layer):
            shapes |= self._attention_weights()
        if mixer is not None:
            shapes |= mixer.weights(self.hidden_size)
        return shapes if self.part_of(layer) == "mixer" else shapes | self._mlp_weights(self.experts_of(layer))

    def _attention_weights(self) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs, inputs, bias in (
            ("self_attn.q_proj", heads, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_heads, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_heads, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, heads, self.out_bias),
        ):
            shapes[f"{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.bias"] = (outputs,)
        if self.has_gate:
            shapes["self_attn.gate_proj.weight"] = (heads, hidden)
        if self.has_sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        if self.qk_norm:
            sizes = (self.head_dim, self.head_dim) if self.qk_norm == "head" else (heads, kv_heads)
            shapes |= {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", sizes, strict=True)}
        return shapes

    def _mlp_weights(self, experts: Experts | None) -> dict[str, tuple[int, ...]]:
        if experts is None:
            return self._mlp("mlp", self.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, self.hidden_size)}
        if experts.has_bias:
            shapes["mlp.gate.bias"] = (experts.count,)
        if experts.has_correction:
            shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
        for index in range(experts.count):
            shapes |= self._mlp(f"mlp.experts.{index}", experts.size)
        if experts.shared_size:
            shapes |= self._mlp("mlp.shared_expert", experts.shared_size)
        if experts.shared_size and experts.has_shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, self.hidden_size)
        return shapes

    def _mlp(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        into = ("gate_proj", "up_proj") if self.gated_mlp else ("up_proj",)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.{part}.weight": (size, self.hidden_size) for part in into}
        shapes[f"{name}.down_proj.weight"] = (self.hidden_size, size)
        if self.mlp_bias:
            shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in tuple(shapes.items())}
        if self.activation == "xielu":
            shapes |= {f"{name}.act_fn.{part}": (1,) for part in XIELU}
        return shapes


def common(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the settings that all architectures share: no bias, no window, one rope. Raises StartupError naming the key
    at fault."""
    num_heads, hidden_size = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    num_kv_heads = integer(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fault("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = integer(hf, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fault("head_dim", f"{head_dim} is odd")
    num_layers = integer(hf, "num_hidden_layers")
    position = rope(hf, rope_parameters(hf))
    if int(head_dim * position.share) % 2:
        raise fault("partial_rotary_factor", f"{position.share:g} of head_dim {head_dim} dimensions is an odd number")
    context_len = integer(hf, "max_position_embeddings", 2048)
    if position.kind == "yarn":  # configs to which users added yarn still have the length of before
        context_len = max(context_len, int(position.factor * position.original_context))
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise fault("hidden_act", f"{echo(activation)} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ModelConfig(
        architecture=(hf.get("architectures") or [""])[0],
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(hf, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=number(hf, "rms_norm_eps", 1e-6),
        context_len=context_len,
        activation=activation,
        attention_scale=head_dim**-0.5,
        windows=(None,) * num_layers,
        ropes=(position,) * num_layers,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def with_multipliers(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads what all Granites share: Llama's block with multipliers for embeddings, residuals, attention and logits."""
    bias = bool(hf.get("attention_bias", False))
    return replace(
        common(hf),
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=number(hf, "embedding_multiplier", 1.0),
        residual_scale=number(hf, "residual_multiplier", 1.0),
        attention_scale=number(hf, "attention_multiplier", 1.0),
        logit_scale=1 / number(hf, "logits_scaling", 1.0),
    )


def integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads a count of at least 1. A missing or null key takes the default, if there is one. Raises StartupError."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise fault(key, "is missing" if value is None else f"must be a positive integer, got {echo(value)}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Reads a key like `integer`, for any positive number."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise fault(key, "is missing" if value is None else f"must be a positive number, got {echo(value)}")
    return float(value)


def layer_number(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Reads a key like `integer`, for any integer that is not negative."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise fault(key, f"must be an integer of at least 0, got {echo(value)}")
    return value


def rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rope's settings, by their newer or their older name; {} where there are none."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = hf.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise fault(key, f"must be an object, got {echo(parameters)}")
    return parameters


def checked(experts: Experts) -> Experts:
    """Returns the experts. Raises StartupError when a token would use more than there are."""
    if experts.num_chosen > experts.count:
        raise fault("num_experts_per_tok", f"{experts.num_chosen} of {experts.count} experts cannot be used")
    return experts


def sparse_layers(hf: Mapping[str, Any], num_layers: int, experts: Experts) -> tuple[Experts | None, ...]:
    """Returns each layer's experts where Qwen's configs have them: every decoder_sparse_step-th layer but those in
    mlp_only_layers."""
    every = integer(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fault("mlp_only_layers", f"must be a list of layers, got {echo(dense)}")
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
        raise fault("rope_scaling", f"{echo(kind)} is not supported; known: {', '.join(ROPE_KINDS)}")
    share = number({**hf, **parameters}, "partial_rotary_factor", 1.0)
    if share > 1:
        raise fault("partial_rotary_factor", f"must be at most 1, got {share:g}")
    base = number({"rope_theta": theta or hf.get("rope_theta"), **parameters}, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(base, share=share)
    if kind == "linear":
        return RopeConfig(base, kind, share=share, factor=number(parameters, "factor"))
    if kind == "longrope":
        return _longrope(hf, parameters, base, share)
    if kind == "yarn":
        return _yarn(hf, parameters, base, share)
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if low >= high:
        raise fault("low_freq_factor", f"must be less than high_freq_factor; got {low:g} and {high:g}")
    return RopeConfig(
        base,
        kind,
        share=share,
        factor=number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=integer(parameters, "original_max_position_embeddings"),
    )


def interleaved(ropes: tuple[RopeConfig | None, ...]) -> tuple[RopeConfig | None, ...]:
    """Returns the same ropes for neighbouring pairs."""
    return tuple(None if rope is None else replace(rope, is_interleaved=True) for rope in ropes)


def without_ropes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without the settings of its ropes, which `ropes_of_windows` reads."""
    return {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling")}


def ropes_of_windows(
    hf: Mapping[str, Any], windows: tuple[int | None, ...], *, local_theta: float, full_theta: float
) -> tuple[RopeConfig, ...]:
    """Returns a rope for each layer: one for layers with a window, another for those without.

    Settings hold for layers without a window, unless the config has them for each kind of layer.
    """
    parameters = rope_parameters(hf)
    local: Mapping[str, Any] = {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local = rope_parameters({"rope_parameters": parameters.get("sliding_attention")})
        parameters = rope_parameters({"rope_parameters": parameters.get("full_attention")})
    own, full = rope({}, local, theta=local_theta), rope(hf, parameters, theta=full_theta)
    return tuple(full if window is None else own for window in windows)


def _longrope(hf: Mapping[str, Any], parameters: Mapping[str, Any], base: float, share: float) -> RopeConfig:
    num_heads = integer(hf, "num_attention_heads")
    dim = int(integer(hf, "head_dim", integer(hf, "hidden_size") // num_heads) * share)
    key = "original_max_position_embeddings"
    original = integer({key: hf.get(key) or parameters.get(key)}, key)
    if original < 2:
        raise fault(key, f"must be at least 2, got {original}")
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


def _yarn(hf: Mapping[str, Any], parameters: Mapping[str, Any], base: float, share: float) -> RopeConfig:
    if base <= 1:
        raise fault("rope_theta", f"must be more than 1 with yarn, got {base:g}")
    key = "original_max_position_embeddings"
    original = integer({key: hf.get(key) or parameters.get(key) or hf.get("max_position_embeddings")}, key)
    factor = number(parameters, "factor", integer(hf, "max_position_embeddings", original) / original)
    fast, slow = number(parameters, "beta_fast", 32.0), number(parameters, "beta_slow", 1.0)
    if fast < slow:
        raise fault("beta_fast", f"must be at least beta_slow; got {fast:g} and {slow:g}")
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise fault("truncate", f"must be true or false, got {echo(truncate)}")
    return RopeConfig(
        base,
        "yarn",
        share=share,
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        magnitude=number(parameters, "attention_factor", _yarn_magnitude(parameters, factor)),
    )


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Returns the factor of rotated vectors where the config names none (arXiv:2309.00071, section 3.4)."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return grown(1.0)
    return grown(number(parameters, "mscale")) / grown(number(parameters, "mscale_all_dim"))


def _factors(parameters: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != length:
        raise fault(f"rope_scaling.{key}", f"must be a list of {length} numbers")
    return tuple(number({key: value}, key) for value in values)


def layer_kinds(hf: Mapping[str, Any], num_layers: int, known: tuple[str, ...], default: list[str]) -> list[str]:
    """Reads layer_types, the kind of each layer. A missing or null key takes the default."""
    kinds = hf.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        allowed = " or ".join(known)
        raise fault("layer_types", f"must say {allowed} for each of {num_layers} layers, got {echo(kinds)}")
    return kinds


def sliding_windows(hf: Mapping[str, Any], num_layers: int, slides: list[bool]) -> tuple[int | None, ...]:
    """Returns a window or None for each layer: by `layer_types` where the config has it, else where `slides` says
    so."""
    usual = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    kinds = layer_kinds(hf, num_layers, ("sliding_attention", "full_attention"), usual)
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = integer(hf, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def refuse(hf: Mapping[str, Any], **allowed: object) -> None:
    """Raises StartupError for a key whose value is present, not null, and other than the one allowed."""
    for key, value in allowed.items():
        if hf.get(key) not in (None, value):
            raise fault(key, f"{echo(hf[key])} is not supported; only {echo(value)} is")


def fault(key: str, what: str) -> StartupError:
    """Returns the error for a key of config.json."""
    return StartupError(f"config.json: {key}: {what}", field=key)
