"""The description of a decoder, read from the dictionary that Hugging Face checkpoints keep in config.json. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from tureen.contract.types import RopeFactors
from tureen.errors import echo
from tureen.layers.activation_names import ACTIVATIONS, XIELU
from tureen.layers.latent import Latent
from tureen.layers.mixers import Mixer
from tureen.layers.rope import RopeConfig
from tureen.layers.routing import Experts
from tureen.models.reading import fault, integer, layer_kinds, number
from tureen.models.ropes import rope, rope_parameters

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


class KvLayer(NamedTuple):
    """The shape of a layer in the KV cache."""

    heads: int
    head_dim: int
    values_from: int = -1  # values are the keys' dimensions from this one on, and are not stored; -1: they are

    @property
    def numbers(self) -> int:
        """The numbers that the layer keeps for a token."""
        return self.heads * self.head_dim * (2 if self.values_from < 0 else 1)


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
    latent: Latent | None = None  # latent attention; num_kv_heads is then 1, and head_dim the size of a cached key
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
    def kv_layers(self) -> tuple[KvLayer, ...]:
        """The layers of the KV cache: those with attention, or one where there are none."""
        values_from = -1 if self.latent is None else self.latent.rope_dim
        return (KvLayer(self.num_kv_heads, self.head_dim, values_from),) * max(1, len(self.attention_layers))

    @property
    def rope_dim(self) -> int:
        """The dimensions of a head that ropes may turn."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

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
        if self.latent is not None:
            return self.latent.weights(hidden, self.num_heads)
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


def checked(experts: Experts) -> Experts:
    """Returns the experts. Raises StartupError when a token would use more than there are, or groups do not fit."""
    if experts.num_chosen > experts.count:
        raise fault("num_experts_per_tok", f"{experts.num_chosen} of {experts.count} experts cannot be used")
    if experts.count % experts.num_groups:
        raise fault("n_group", f"{experts.num_groups} groups cannot share {experts.count} experts evenly")
    if experts.num_chosen_groups > experts.num_groups:
        raise fault("topk_group", f"{experts.num_chosen_groups} of {experts.num_groups} groups cannot be used")
    if experts.count // experts.num_groups * experts.num_chosen_groups < experts.num_chosen:
        raise fault("topk_group", f"{experts.num_chosen_groups} groups have less than {experts.num_chosen} experts")
    return experts


def sparse_layers(hf: Mapping[str, Any], num_layers: int, experts: Experts) -> tuple[Experts | None, ...]:
    """Returns each layer's experts where Qwen's configs have them: every decoder_sparse_step-th layer but those in
    mlp_only_layers."""
    every = integer(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fault("mlp_only_layers", f"must be a list of layers, got {echo(dense)}")
    return tuple(experts if (layer + 1) % every == 0 and layer not in dense else None for layer in range(num_layers))


def sliding_windows(hf: Mapping[str, Any], num_layers: int, slides: list[bool]) -> tuple[int | None, ...]:
    """Returns a window or None for each layer: by `layer_types` where the config has it, else where `slides` says
    so."""
    usual = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    kinds = layer_kinds(hf, num_layers, ("sliding_attention", "full_attention"), usual)
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = integer(hf, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
