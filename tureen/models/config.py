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
from tureen.layers.layer_inputs import LayerInputs, ResidualStreams
from tureen.layers.layer_keys import LayerKeys
from tureen.layers.mixers import Mixer
from tureen.layers.rope import RopeConfig
from tureen.layers.routing import Experts
from tureen.models.reading import fault, integer, layer_kinds, number
from tureen.models.ropes import rope, rope_parameters, sections

STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some checkpoints keep in one, their rows one after another."""
WIDEST = 1 << 30
"""A window that hides no token: contexts are shorter."""
EXPERT_NAMES = ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
"""Parts of the names of experts in Mixtral's checkpoints, and others -> our names."""


LAYER_NORMS = {
    "pre": ("input", "post_attention"),
    "post": ("post_attention", "post_feedforward"),
    "both": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "parallel": ("input",),
}
"""The norms of a layer by ModelConfig.norms, in the order in which they are applied."""

STREAM_MAPS = ("altup_projections", "altup_unembed_projections")
"""The matrices of every stream but the first: from the embedding to the stream, and from the stream to the result."""
BESIDE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""The norms of a layer with experts beside an mlp: after the mlp, before the experts, after them."""


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


class WholePictures(NamedTuple):
    """A model whose layers see a picture whole: each of its tokens sees all others, also those after it."""

    layers: Literal["all", "windows"]  # windows: those with a window
    most_tokens: int  # of a picture


class KvLayer(NamedTuple):
    """The shape of a layer in the KV cache."""

    heads: int
    head_dim: int
    values_from: int = -1  # values are the keys' dimensions from this one on; -1: values are stored
    has_window: bool = False

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
    keys: tuple[LayerKeys, ...] = ()  # per layer; empty: num_kv_heads of head_dim, not shared
    mlp_sizes: tuple[int, ...] = ()  # per layer; empty: intermediate_size
    mlp_cutoffs: tuple[float | None, ...] = ()  # per layer, see mlp_cutoff; empty: no gate is cut
    num_deep_inputs: int = 0  # layers, the first, after which further parts of given embeddings are added
    layer_inputs: LayerInputs | None = None
    streams: ResidualStreams | None = None  # None: one residual stream; with several, layers have layer_inputs
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
    value_norm: bool = False  # each head's values are normalised, without a weight
    has_gate: bool = False  # what each head gives is multiplied by the sigmoid of a gate
    has_sinks: bool = False  # each head has one more score in its softmax, which no value belongs to
    query_growth: QueryGrowth | None = None
    whole_pictures: WholePictures | None = None
    extra_layers: int = 0  # stored after the last layer, to predict further tokens; they are not read
    unit_offset_norm: bool = False  # Hugging Face checkpoints store the norms' weights minus 1
    embedding_scale: float | None = None  # token embeddings are multiplied by it
    residual_scale: float = 1.0
    has_layer_scales: bool = False  # a weight multiplies each layer's result
    attention_softcap: float | None = None  # of q · k * attention_scale
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers with keys of their own, in the order of the KV cache."""
        layers = (layer for layer in range(self.num_layers) if self.has_attention(layer))
        return tuple(layer for layer in layers if self.keys_of(layer).of_layer is None)

    def cache_place(self, layer: int) -> int:
        """Returns the index in the KV cache of the keys that a layer uses."""
        shared = self.keys_of(layer).of_layer
        return self.cached_layers.index(layer if shared is None else shared)

    @property
    def kv_layers(self) -> tuple[KvLayer, ...]:
        """The layers of the KV cache: those with keys of their own, or one layer if no layer has keys."""
        values_from = -1 if self.latent is None else self.latent.rope_dim
        own = [(self.keys_of(layer), self.windows[layer]) for layer in self.cached_layers or (0,)]
        return tuple(KvLayer(keys.num_heads, keys.head_dim, values_from, bool(window)) for keys, window in own)

    @property
    def longest_window(self) -> int:
        """The longest window of a layer in the KV cache; 0: no layer has one."""
        return max((self.windows[layer] or 0 for layer in self.cached_layers), default=0)

    def keys_of(self, layer: int) -> LayerKeys:
        """Returns the keys and values of a layer."""
        return self.keys[layer] if self.keys else LayerKeys(self.num_kv_heads, self.head_dim)

    def longest_step(self, chunk: int) -> int:
        """Returns the most tokens of one sequence in a step. chunk: the server's limit, which whole pictures exceed."""
        return chunk if self.whole_pictures is None else max(chunk, self.whole_pictures.most_tokens)

    def sees_picture_whole(self, layer: int) -> bool:
        """Returns whether a picture's tokens see all of it in a layer, also those after them."""
        pictures = self.whole_pictures
        return pictures is not None and (pictures.layers == "all" or self.windows[layer] is not None)

    def rope_dim(self, layer: int) -> int:
        """Returns the number of a head's dimensions that a layer's rope may turn."""
        return self.keys_of(layer).head_dim if self.latent is None else self.latent.rope_dim

    def rope_kinds(self) -> list[tuple[RopeConfig, int]]:
        """Returns each distinct rope once, with the number of dimensions that it may turn."""
        ropes = ((rope, self.rope_dim(layer)) for layer, rope in enumerate(self.ropes) if rope is not None)
        return list(dict.fromkeys(ropes))

    def mlp_size(self, layer: int) -> int:
        """Returns the intermediate size of a layer's mlp."""
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    @property
    def num_maps(self) -> int:
        """The number of additional residual streams."""
        return 0 if self.streams is None else self.streams.count - 1

    def mlp_cutoff(self, layer: int) -> float | None:
        """Returns the cutoff of a layer's gates in standard deviations above their mean; None: no gate is cut."""
        return self.mlp_cutoffs[layer] if self.mlp_cutoffs else None

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
        return _weights(self)

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


def _weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        layer = _layer_weights(config, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    inputs = config.layer_inputs
    if inputs is not None:
        width = config.num_layers * inputs.size
        shapes["model.embed_tokens_per_layer.weight"] = (inputs.vocab_size, width)
        shapes["model.per_layer_model_projection.weight"] = (width, config.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (inputs.size,)
    for index in range(config.num_maps):
        for name in STREAM_MAPS:
            shapes[f"model.{name}.{index}.weight"] = (config.hidden_size, config.hidden_size)
    shapes |= _norm_weights(config, "model.norm", config.hidden_size)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def _norm_weights(config: ModelConfig, name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (size,) for part in ("weight", *(("bias",) if config.norm_bias else ()))}


def _layer_weights(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    mixer = config.mixer_of(layer)
    for name in config.layer_norms(layer):
        shapes |= _norm_weights(config, name, config.hidden_size)
    if config.has_attention(layer):
        shapes |= _attention_weights(config, layer)
    if mixer is not None:
        shapes |= mixer.weights(config.hidden_size)
    if config.layer_inputs is not None:
        size = config.layer_inputs.size
        shapes["per_layer_input_gate.weight"] = (size, config.hidden_size)
        shapes["per_layer_projection.weight"] = (config.hidden_size, size)
        shapes["post_per_layer_input_norm.weight"] = (config.hidden_size,)
    if config.streams is not None:
        shapes |= config.streams.weights(config.hidden_size)
    if config.has_layer_scales:
        shapes["layer_scalar"] = (1,)
    return shapes if config.part_of(layer) == "mixer" else shapes | _mlp_weights(config, layer)


def _attention_weights(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, keys = config.hidden_size, config.keys_of(layer)
    if config.latent is not None:
        return config.latent.weights(hidden, config.num_heads)
    heads, kv_heads = config.num_heads * keys.head_dim, keys.num_heads * keys.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (*qkv_names(keys), "o_proj"):
        is_out = name == "o_proj"
        size = heads if name in ("q_proj", "o_proj") else kv_heads
        shapes[f"self_attn.{name}.weight"] = (hidden, size) if is_out else (size, hidden)
        if config.out_bias if is_out else config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (hidden if is_out else size,)
    if config.has_gate:
        shapes["self_attn.gate_proj.weight"] = (heads, hidden)
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    if config.qk_norm:
        sizes = (keys.head_dim, keys.head_dim) if config.qk_norm == "head" else (heads, kv_heads)
        shapes["self_attn.q_norm.weight"] = sizes[:1]
        if keys.of_layer is None:
            shapes["self_attn.k_norm.weight"] = sizes[1:]
    return shapes


def qkv_names(keys: LayerKeys) -> tuple[str, ...]:
    """Returns the names of the matrices that make a layer's queries, keys and values."""
    if keys.of_layer is not None:
        return ("q_proj",)
    return ("q_proj", "k_proj") if keys.are_values else ("q_proj", "k_proj", "v_proj")


def _mlp_weights(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    experts = config.experts_of(layer)
    if experts is None:
        return _mlp(config, "mlp", config.mlp_size(layer))
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, config.hidden_size)}
    if experts.are_beside:
        shapes |= _mlp(config, "mlp", config.mlp_size(layer))
        shapes["mlp.gate.scale"] = (config.hidden_size,)
        shapes["mlp.gate.per_expert_scale"] = (experts.count,)
        shapes |= {f"{name}.weight": (config.hidden_size,) for name in BESIDE_NORMS}
    if experts.has_bias:
        shapes["mlp.gate.bias"] = (experts.count,)
    if experts.has_correction:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
    for index in range(experts.count):
        shapes |= _mlp(config, f"mlp.experts.{index}", experts.size)
    if experts.shared_size:
        shapes |= _mlp(config, "mlp.shared_expert", experts.shared_size)
    if experts.shared_size and experts.has_shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, config.hidden_size)
    return shapes


def _mlp(config: ModelConfig, name: str, size: int) -> dict[str, tuple[int, ...]]:
    into = ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{part}.weight": (size, config.hidden_size) for part in into}
    shapes[f"{name}.down_proj.weight"] = (config.hidden_size, size)
    if config.mlp_bias:
        shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in tuple(shapes.items())}
    if config.activation == "xielu":
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


def with_sections(
    config: ModelConfig, hf: Mapping[str, Any], default: tuple[int, int, int], *, alternate: bool
) -> ModelConfig:
    """Returns the config for tokens that have a frame, a row and a column. Raises StartupError; see ropes.sections."""
    first = next(rope for rope in config.ropes if rope is not None)
    counts = sections(hf, int(config.head_dim * first.share) // 2, default, alternate=alternate)
    turned = (rope and replace(rope, sections=counts, sections_alternate=alternate) for rope in config.ropes)
    return replace(config, ropes=tuple(turned))


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
    """Returns the experts. Raises StartupError if a token would use more experts than exist, or groups do not fit."""
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
    window = min(integer(hf, "sliding_window"), WIDEST)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
