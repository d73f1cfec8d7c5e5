"""Hugging Face names of a GGUF file's tensors. `*` in a name is the number of an expert or of a head: the tensor holds
all of them.

Source: llama.cpp's src/llama-arch.cpp.
"""

from __future__ import annotations

import re
from typing import Final

from tureen.weights.gguf_rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "altup_proj.weight": "model.altup_projections.*.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.*.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.*",
    "attn_v_b": "self_attn.v_b_proj.*",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
WHOLE_NAMES: Final = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Tensors of layers whose names end otherwise, or not at all."""
GEMMA: Final = {"ffn_norm": "pre_feedforward_layernorm"}
FUSED: Final = {"attn_qkv": "self_attn.qkv_proj"}
"""Names of a matrix of q, k and v. Files whose rows of q and k are interleaved do not have it."""
SECOND_EMBEDDING: Final = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA3N: Final = (
    GEMMA
    | SECOND_EMBEDDING
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
GEMMA4: Final = (
    GEMMA
    | FUSED
    | SECOND_EMBEDDING
    | {
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_up_exps": "experts.*.gate_up_proj",
        "ffn_gate_exps": "experts.*.gate_proj",
        "ffn_up_exps": "experts.*.up_proj",
        "ffn_down_exps": "experts.*.down_proj",
    }
)
FUSED_UP: Final = {"ffn_up": "mlp.gate_up_proj"}
DELTA: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
KIMI_DELTA: Final = {
    **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
    **{f"ssm_{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
MAMBA: Final = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_WHOLE: Final = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
CONV: Final = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
OTHER_NAMES: Final = {
    **dict.fromkeys(("falcon_h1", "granitemoehybrid"), MAMBA),
    "gemma": FUSED,
    "gemma2": GEMMA | FUSED,
    "gemma3_text": GEMMA | FUSED,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "glm": FUSED | FUSED_UP,
    "glm4": FUSED
    | FUSED_UP
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "kimi_linear": KIMI_DELTA,
    "lfm2": CONV,
    "nemotron_h": {part: name.replace("mamba.", "mixer.") for part, name in MAMBA.items()},
    "phi3": FUSED | FUSED_UP,
    "phimoe": FUSED,
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), FUSED),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), FUSED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA),
}
"""Names that differ from those above, by model_type."""
OTHER_WHOLE: Final = {
    "falcon_h1": MAMBA_WHOLE | {"ffn_norm": "post_attention_layernorm.weight"},
    "granitemoehybrid": MAMBA_WHOLE,
    "nemotron_h": {part: name.replace("mamba.", "mixer.") for part, name in MAMBA_WHOLE.items()},
}
"""Names that differ from WHOLE_NAMES, by model_type. `mixer` is Nemotron's own name, which its RENAMES replace."""
OTHER_TOP: Final = {
    "lfm2": {"token_embd_norm.weight": "model.norm.weight"},
    "nemotron_h": {"output_norm.weight": "model.norm_f.weight"},
}
"""Names that differ from TOP_NAMES, by model_type."""
INTERLEAVED: Final = frozenset((
    "arcee", "granite", "granitemoe", "granitemoehybrid", "llama", "ministral3", "mistral", "mixtral", "nemotron_h",
    "smollm3",
))  # fmt: skip
"""Values of model_type whose files have the two halves of each head's rows of q and k interleaved."""
IN_CONFIG: Final = frozenset((LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS))
"""Tensors that are part of the config."""
UNIT_OFFSET: Final = frozenset((
    "gemma", "gemma2", "gemma3_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
))  # fmt: skip
"""Values of model_type whose GGUF files store 1 plus the norm weights of the checkpoint."""
XIELU: Final = {f"xielu.{name}": name for name in ("alpha_n", "alpha_p", "beta", "eps")}
"""Keys of the metadata -> names of weights."""
LAYER: Final = re.compile(r"blk\.(\d+)\.")
LAYER_TENSOR: Final = re.compile(r"([a-z_.\d]+?)(?:\.(\d+))?\.(weight|bias)")
EXPERT_PARTS: Final = ("ffn_gate", "ffn_up", "ffn_down")


def hf_name(name: str, model_type: str) -> str | None:
    """Returns the Hugging Face name of a tensor; None for an unknown one."""
    top = TOP_NAMES | OTHER_TOP.get(model_type, {})
    if name in top:
        return top[name]
    layer = layer_of(name)
    if layer is None:
        return None
    own = name.split(".", 2)[2]
    whole = WHOLE_NAMES | OTHER_WHOLE.get(model_type, {})
    if own in whole:
        return f"model.layers.{layer}.{whole[own]}"
    match = LAYER_TENSOR.fullmatch(own)
    if match is None:
        return None
    part, expert, kind = match.groups()
    names = LAYER_NAMES | OTHER_NAMES.get(model_type, {})
    if expert is not None:  # files written before 2024 have a tensor for each expert
        part = f"{part}_exps" if part in EXPERT_PARTS else ""
    if part not in names:
        return None
    return f"model.layers.{layer}.{names[part]}.{kind}".replace("*", expert or "*")


def layer_of(name: str) -> int | None:
    """Returns the layer that a tensor belongs to, None for the others."""
    match = LAYER.match(name)
    return None if match is None else int(match[1])
