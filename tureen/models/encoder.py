"""The description of an encoder, in which each token sees those before and after it. No torch.

Its weights have the names of a decoder's: a family's RENAMES leads from the names in its checkpoints to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tureen.contract.types import Pooling
from tureen.errors import StartupError, echo
from tureen.layers.rope import RopeConfig
from tureen.models.reading import integer

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
"""Names in config.json -> names of the functions here."""
UNUSED = ("cls.", "lm_head.", "decoder.", "vocab_", "embeddings.position_ids", "pooler.")
"""Beginnings of names, after renaming, that are not used: heads for training, and numbers that need no file."""
BERT_NAMES = (
    ("embeddings.word_embeddings.", "embed_tokens."),
    ("embeddings.position_embeddings.", "embed_positions."),
    ("embeddings.token_type_embeddings.", "embed_types."),
    ("embeddings.LayerNorm.", "embed_norm."),
    ("encoder.layer.", "layers."),
    ("attention.self.query.", "self_attn.q_proj."),
    ("attention.self.key.", "self_attn.k_proj."),
    ("attention.self.value.", "self_attn.v_proj."),
    ("attention.output.dense.", "self_attn.o_proj."),
    ("attention.output.LayerNorm.", "post_attention_layernorm."),
    ("intermediate.dense.", "mlp.up_proj."),
    ("output.dense.", "mlp.down_proj."),
    ("output.LayerNorm.", "post_feedforward_layernorm."),
    ("norm.gamma", "norm.weight"),
    ("norm.beta", "norm.bias"),
)
"""Parts of names in checkpoints of BERT and its like -> what they are called here."""


class EncoderHead(msgspec.Struct, frozen=True, kw_only=True):
    """The matrices that make a classifier's logits: `head.out`, and `head.dense` before it where `dense` names its
    activation. With `has_norm` a norm, `head.norm`, follows the activation."""

    pooling: Pooling = "cls"
    dense: str = ""
    has_dense_bias: bool = True
    has_norm: bool = False


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The complete description of an encoder: every runner builds it from this alone.

    A layer adds attention(x) to x, then mlp(x). Norms precede them (`pre_norms`), follow them (`post_norms`), or follow
    the sums (`norms_follow_sum`). The mlp is down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is
    gated. `windows` and `ropes` have one entry a layer; a window of n lets a token see itself and the n tokens on each
    side.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_tokens: int
    activation: str
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    num_positions: int = 0  # learned; 0 = none
    padding: int | None = None  # positions begin after this number, and tokens of this id take none (RoBERTa)
    num_token_types: int = 0
    has_pair_types: bool = False  # the second text of a pair is of the second type
    num_buckets: int = 0  # of distances between tokens, whose biases are added to the scores (arXiv:1910.10683)
    has_embedding_norm: bool = True
    embedding_scale: float | None = None  # token embeddings are multiplied by it
    pre_norms: bool = False
    first_norm: bool = True  # with pre_norms: the first layer has one before its attention
    post_norms: bool = False
    norms_follow_sum: bool = False
    final_norm: bool = False
    rms_norms: bool = False  # they divide by the root of the mean square, and have no bias
    norm_bias: bool = True
    unit_offset_norm: bool = False  # checkpoints store the norms' weights minus 1
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    is_gated: bool = False
    head: EncoderHead | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def weights(self, num_labels: int = 0) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each weight by its name. A matrix is [outputs, inputs]. num_labels: of the head."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, hidden)}
        if self.num_positions:
            shapes["embed_positions.weight"] = (self.num_positions, hidden)
        if self.num_token_types:
            shapes["embed_types.weight"] = (self.num_token_types, hidden)
        if self.num_buckets:
            shapes["relative_bias.weight"] = (self.num_buckets, self.num_heads)
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._layer_weights(layer).items()}
        for name, is_there in (("embed_norm", self.has_embedding_norm), ("norm", self.final_norm)):
            if is_there:
                shapes |= self._norm(name, hidden)
        return shapes | self._head_weights(num_labels)

    def _layer_weights(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gate = [("mlp.gate_proj", inner, hidden, self.mlp_bias)] if self.is_gated else []
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs, inputs, has_bias in (
            ("self_attn.q_proj", heads, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_heads, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_heads, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, heads, self.out_bias),
            *gate,
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            shapes[f"{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{name}.bias"] = (outputs,)
        for name in self._norms_of(layer):
            shapes |= self._norm(name, hidden)
        if self.qk_norm:
            shapes |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        return shapes

    def _norms_of(self, layer: int) -> list[str]:
        names = []
        if self.pre_norms:
            names = ["input_layernorm", "pre_feedforward_layernorm"][0 if self.first_norm or layer else 1 :]
        return names + (["post_attention_layernorm", "post_feedforward_layernorm"] if self.post_norms else [])

    def _norm(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        parts = ("weight", "bias") if self.norm_bias and not self.rms_norms else ("weight",)
        return {f"{name}.{part}": (size,) for part in parts}

    def _head_weights(self, num_labels: int) -> dict[str, tuple[int, ...]]:
        if self.head is None:
            return {}
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"head.out.weight": (num_labels, hidden), "head.out.bias": (num_labels,)}
        if self.head.dense:
            shapes["head.dense.weight"] = (hidden, hidden)
        if self.head.dense and self.head.has_dense_bias:
            shapes["head.dense.bias"] = (hidden,)
        return shapes | (self._norm("head.norm", hidden) if self.head.has_norm else {})


def bert_like(hf: Mapping[str, Any], **further: Any) -> EncoderConfig:
    """Reads the settings that BERT and its like share. `further`: more fields of the family. Raises
    StartupError naming the key at fault."""
    expect(hf, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    hidden, heads, layers = (integer(hf, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    positions = integer(hf, "max_position_embeddings")
    return EncoderConfig(
        vocab_size=integer(hf, "vocab_size"),
        intermediate_size=integer(hf, "intermediate_size"),
        activation=activation(hf, "hidden_act"),
        num_positions=positions,
        post_norms=True,
        norms_follow_sum=True,
        **{"max_tokens": positions, **of_heads(hidden, heads), **of_layers(layers), **further},
    )


def of_heads(hidden_size: int, num_heads: int) -> dict[str, Any]:
    """Returns the fields of an encoder whose heads share its width. Raises StartupError when they cannot."""
    if hidden_size % num_heads:
        raise StartupError(
            f"config.json: hidden_size {hidden_size} cannot be shared by {num_heads} heads", field="num_attention_heads"
        )
    head_dim = hidden_size // num_heads
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
    }


def of_layers(num_layers: int, rope: RopeConfig | None = None) -> dict[str, Any]:
    """Returns the fields of an encoder whose layers are alike and have no window."""
    return {"windows": (None,) * num_layers, "ropes": (rope,) * num_layers}


def is_classifier(hf: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes a model with a head for labels."""
    return str((hf.get("architectures") or [""])[0]).endswith("ForSequenceClassification")


def activation(hf: Mapping[str, Any], name: str) -> str:
    """Reads the name of an activation; gelu if the config names none. Raises StartupError."""
    value = hf.get(name) or "gelu"
    if value not in ACTIVATIONS:
        raise StartupError(
            f"config.json: {name}: must be one of {', '.join(ACTIVATIONS)}, got {echo(value)}", field=name
        )
    return ACTIVATIONS[value]


def expect(hf: Mapping[str, Any], **allowed: Any) -> None:
    """Raises StartupError for a key whose value is present, not null, and other than the one allowed."""
    for name, value in allowed.items():
        if hf.get(name) not in (None, value):
            raise StartupError(f"config.json: {name}: must be {echo(value)}, got {echo(hf[name])}", field=name)
