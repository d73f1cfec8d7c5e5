"""Families of decoders in GGUF files: the entries of config.json that the metadata of each give.

Source: llama.cpp's src/models, and its converter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Final, NamedTuple

from tureen.weights.gguf_experts import PLAIN_CHOICE, SHARED, SIGMOID, Config, experts, mixtral_experts, shared
from tureen.weights.gguf_facts import GgufFacts
from tureen.weights.gguf_gemma import gemma3n, gemma4
from tureen.weights.gguf_latent import deepseek2, kimi_linear, minicpm3
from tureen.weights.gguf_mamba import falcon_h1, granite_hybrid, nemotron_h, nemotron_h_moe
from tureen.weights.gguf_rope import with_sections

OF_MAMBA: Final = (
    *(f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")),
    "expert_shared_feed_forward_length",
)
"""Keys that files of dense Granite 4 have for parts that the model does not have."""
STARCODER2_WINDOW: Final = 4096
"""The window of every published StarCoder2; its files do not say it."""
PHIMOE_ORIGINAL: Final = 4096
PHIMOE_MAGNITUDE: Final = 1.243163121016122
"""The short_mscale and long_mscale of the published PhiMoEs, whose LongRoPE begins with PHIMOE_ORIGINAL tokens. Their
files have llama.cpp's own number instead."""


def _llama(facts: GgufFacts, config: Config) -> Config:
    window = facts.optional_count("attention.sliding_window")
    if facts.get("expert_count"):
        count, used = experts(facts)
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window,
            "num_local_experts": count,
            "num_experts_per_tok": used,
        }
    if window is not None:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {"model_type": "llama"}


def _qwen2moe(facts: GgufFacts, config: Config) -> Config:
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": config["attention_bias"],
        **_qwen_shared(facts, config),
        **_qwen_experts(facts, config, expert_weights_norm=False, expert_shared_feed_forward_length=None),
    }


def _qwen3moe(facts: GgufFacts, config: Config) -> Config:
    return {"model_type": "qwen3_moe", **_qwen_experts(facts, config)}


def _qwen2vl(facts: GgufFacts, config: Config) -> Config:
    scaling = with_sections(facts, config, config["head_dim"] // 2, alternate=False)
    return {"model_type": "qwen2_5_vl_text", "use_sliding_window": False, "rope_scaling": scaling}


def _qwen3vl(facts: GgufFacts, config: Config) -> Config:
    facts.stored("n_deepstack_layers")  # of pictures, which have none here: the mmproj file says which layers
    scaling = with_sections(facts, config, config["head_dim"] // 2, alternate=True)
    return {"model_type": "qwen3_vl_text", "rope_scaling": scaling, "vision_config": {"deepstack_visual_indexes": []}}


def _qwen3vlmoe(facts: GgufFacts, config: Config) -> Config:
    return {**_qwen3vl(facts, config), **_qwen3moe(facts, config), "model_type": "qwen3_vl_moe_text"}


def _qwen_shared(facts: GgufFacts, config: Config) -> Config:
    return {
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length", config["intermediate_size"])
    }


def _qwen_experts(facts: GgufFacts, config: Config, **allowed: object) -> Config:
    """Returns what Qwen's architectures with experts share."""
    count, used = experts(facts, **allowed)
    size = facts.count("expert_feed_forward_length", max(1, config["intermediate_size"] // used))
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "norm_topk_prob": (PLAIN_CHOICE | allowed)["expert_weights_norm"],
        "use_sliding_window": False,
    }


def _windows(facts: GgufFacts, config: Config, *, every: int) -> list[str]:
    """Returns each layer's kind. every: each n-th layer has no window, if the metadata do not say."""
    layers, key = config["num_hidden_layers"], "attention.sliding_window_pattern"
    slides = facts.flags(key, layers)
    if slides is None:
        every = facts.count(key, every)
        slides = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]


def _one_theta(facts: GgufFacts, config: Config) -> None:
    """Raises StartupError if layers with a window have another rope."""
    theta, local = config["rope_theta"], facts.number("rope.freq_base_swa", config["rope_theta"])
    if local != theta:
        raise facts.unsupported(f"{facts.architecture}.rope.freq_base_swa must be {theta:g}, got {local:g}")


def _gemma3(facts: GgufFacts, config: Config) -> Config:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        facts.refuse(key, "capping of logits")
    return {
        "model_type": "gemma3_text",
        **_gemma(facts, config, every=6, layers_of_27b=62),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "sliding_window": facts.count("attention.sliding_window"),
    }


def _gemma_embedding(facts: GgufFacts, config: Config) -> Config:
    for number, part in product((2, 3), ("in", "out")):
        facts.stored(f"dense_{number}_feat_{part}")  # the tensors' shapes say it
    return _gemma3(facts, config) | {"use_bidirectional_attention": True}


def _gemma2(facts: GgufFacts, config: Config) -> Config:
    return {
        "model_type": "gemma2",
        **_gemma(facts, config, every=2, layers_of_27b=46),
        "sliding_window": facts.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def _gemma(facts: GgufFacts, config: Config, *, every: int, layers_of_27b: int) -> Config:
    """Returns what Gemma 2 and 3 share."""
    is_27b = config["num_hidden_layers"] == layers_of_27b  # it scales by hidden size over heads, not by the head size
    scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _windows(facts, config, every=every),
        "query_pre_attn_scalar": scale,
    }


def _phi3(facts: GgufFacts, config: Config) -> Config:
    original = "original_max_position_embeddings"
    return {
        "model_type": "phi3",
        "sliding_window": facts.optional_count("attention.sliding_window"),
        original: (config["rope_scaling"] or {}).get(original),
    }


def _granite(facts: GgufFacts, config: Config) -> Config:
    for key in OF_MAMBA:
        facts.stored(key)
    scales = {
        "embedding_multiplier": facts.factor("embedding_scale", 1.0),
        "residual_multiplier": facts.factor("residual_scale", 1.0),
        "attention_multiplier": facts.factor("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": facts.number("logit_scale"),
    }
    if facts.get("rope.scaling.finetuned") is not False:
        return {"model_type": "granite", **scales}
    return scales | _granite4(facts, config)  # so llama.cpp's files say that the model has no positions


def _granite4(facts: GgufFacts, config: Config) -> Config:
    has_rope = facts.get("rope.scaling.finetuned") is not False
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": config["intermediate_size"],
        "position_embedding_type": "rope" if has_rope else "nope",
        "layer_types": ["attention"] * config["num_hidden_layers"],
    }


def _granitehybrid(facts: GgufFacts, config: Config) -> Config:
    hybrid = granite_hybrid(facts, config)
    return _granite(facts, config) | _granite4(facts, config) | hybrid


def _granitemoe(facts: GgufFacts, config: Config) -> Config:
    if facts.get("rope.scaling.finetuned") is False:
        raise facts.unsupported("attention without positions (granitemoe.rope.scaling.finetuned) is not supported")
    shared = facts.optional_count("expert_shared_feed_forward_length")
    more = {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": shared} if shared else {}
    experts = mixtral_experts(facts, config, expert_shared_feed_forward_length=None)
    return _granite(facts, config) | experts | {"model_type": "granitemoe"} | more


def _gpt_oss(facts: GgufFacts, config: Config) -> Config:
    scaling = config["rope_scaling"]
    _one_theta(facts, config)
    return {
        "model_type": "gpt_oss",
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": _windows(facts, config, every=2),
        "rope_scaling": scaling and {**scaling, "truncate": False},
        **mixtral_experts(facts, config),
    }


def _lfm2(facts: GgufFacts, config: Config) -> Config:
    has_attention = facts.are_set("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "model_type": "lfm2",
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "layer_types": ["full_attention" if is_set else "conv" for is_set in has_attention],
    }


def _gated_delta(facts: GgufFacts, config: Config) -> Config:
    """Returns what Qwen3-Next and Qwen3.5 share."""
    heads, width = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size")
    if width % heads:
        raise facts.fault(
            f"{facts.architecture}.ssm.inner_size {width} is not a multiple of ssm.time_step_rank, {heads}"
        )
    return {
        "linear_num_key_heads": facts.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "full_attention_interval": facts.count("full_attention_interval", 4),
    }


def _qwen3next(facts: GgufFacts, config: Config) -> Config:
    return {
        "model_type": "qwen3_next",
        **_gated_delta(facts, config),
        **_qwen_shared(facts, config),
        **_qwen_experts(facts, config, expert_shared_feed_forward_length=None),
    }


def _qwen35(facts: GgufFacts, config: Config) -> Config:
    facts.stored("rope.dimension_sections")  # of pictures: a text has the same position in each
    return {"model_type": "qwen3_5_text", "linear_value_heads_apart": True, **_gated_delta(facts, config)}


def _qwen35moe(facts: GgufFacts, config: Config) -> Config:
    return {
        **_qwen35(facts, config),
        "model_type": "qwen3_5_moe_text",
        **_qwen_shared(facts, config),
        **_qwen_experts(facts, config, expert_shared_feed_forward_length=None),
    }


def _plain(model_type: str, **more: object) -> Callable[[GgufFacts, Config], Config]:
    """Returns a reader for a family that `_common` describes, but for these entries."""
    return lambda facts, config: {"model_type": model_type, **more}


def _mistral3(facts: GgufFacts, config: Config) -> Config:
    scaling, beta = config["rope_scaling"], facts.factor("attention.temperature_scale", 0.0)
    if not beta:
        return {"model_type": "ministral3"}
    if scaling is None or scaling["rope_type"] != "yarn":
        raise facts.unsupported("mistral3.attention.temperature_scale without YaRN is not supported")
    original = scaling["original_max_position_embeddings"]
    if facts.count("attention.temperature_length", original) != original:
        raise facts.unsupported(f"mistral3.attention.temperature_length must be {original}")
    return {"model_type": "ministral3", "rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}


def _olmo2(facts: GgufFacts, config: Config) -> Config:
    window = facts.optional_count("attention.sliding_window")
    if window is None:
        return {"model_type": "olmo2"}
    _one_theta(facts, config)
    layer_types = _windows(facts, config, every=4)
    more = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, "layer_types": layer_types}
    return {"model_type": "olmo3", **more}


def _exaone4(facts: GgufFacts, config: Config) -> Config:
    window = facts.optional_count("attention.sliding_window")
    _one_theta(facts, config)
    more = {} if window is None else {"layer_types": _windows(facts, config, every=4)}
    return {"model_type": "exaone4", "sliding_window": window, **more}


def _seed_oss(facts: GgufFacts, config: Config) -> Config:
    return {"model_type": "seed_oss", "attention_out_bias": facts.has("blk.0.attn_output.bias")}


def _ernie4_5(facts: GgufFacts, config: Config) -> Config:
    return {"model_type": "ernie4_5", "use_bias": config["attention_bias"]}


def _ernie4_5_moe(facts: GgufFacts, config: Config) -> Config:
    dense = ("leading_dense_block_count", "interleave_moe_layer_step")
    count, used = experts(facts, **dict.fromkeys((*SHARED, *dense)))
    size = facts.count("expert_feed_forward_length")
    return {
        **_ernie4_5(facts, config),
        "model_type": "ernie4_5_moe",
        "moe_num_experts": count,
        "moe_k": used,
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared(facts, size),
        "moe_layer_start_index": facts.optional_count("leading_dense_block_count") or 0,
        "moe_layer_interval": facts.optional_count("interleave_moe_layer_step") or 1,
    }


def _hunyuan_moe(facts: GgufFacts, config: Config) -> Config:
    size = facts.count("expert_feed_forward_length", config["intermediate_size"])
    shared = facts.count("expert_shared_feed_forward_length", size)
    if shared != size:
        raise facts.unsupported(f"hunyuan-moe.expert_shared_feed_forward_length must be {size}, got {shared}")
    count, used = experts(facts, expert_shared_count=1, expert_shared_feed_forward_length=size)
    return {"model_type": "hunyuan_v1_moe", "num_experts": count, "moe_topk": used, "intermediate_size": size}


def _olmoe(facts: GgufFacts, config: Config) -> Config:
    experts = mixtral_experts(facts, config, expert_weights_norm=False)
    return {"model_type": "olmoe", "norm_topk_prob": False, **experts}


def _starcoder2(facts: GgufFacts, config: Config) -> Config:
    return {
        "model_type": "starcoder2",
        "norm_epsilon": config["rms_norm_eps"],
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": config["attention_bias"],
        "sliding_window": facts.count("attention.sliding_window", STARCODER2_WINDOW),
    }


def _cohere2(facts: GgufFacts, config: Config) -> Config:
    _one_theta(facts, config)
    return {
        "model_type": "cohere2",
        "layer_norm_eps": config["rms_norm_eps"],
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": _windows(facts, config, every=4),
        "logit_scale": facts.number("logit_scale"),
    }


def _command_r(facts: GgufFacts, config: Config) -> Config:
    if facts.has("blk.0.attn_q_norm.weight"):  # of Command R+
        raise facts.unsupported("a norm of queries and keys in command-r (use_qk_norm) is not supported")
    return {
        "model_type": "cohere",
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": facts.number("logit_scale"),
    }


def _phimoe(facts: GgufFacts, config: Config) -> Config:
    scaling = dict(config["rope_scaling"] or {})
    if scaling.get("rope_type") == "longrope":
        original = scaling["original_max_position_embeddings"]
        if original != PHIMOE_ORIGINAL:
            raise facts.unsupported(
                f"LongRoPE of a phimoe with {original} tokens at first, not {PHIMOE_ORIGINAL}, is not supported: its "
                "files lack short_mscale"
            )
        scaling |= {"attention_factor": PHIMOE_MAGNITUDE}
    experts = mixtral_experts(facts, config, expert_weights_norm=False)
    more = {"lm_head_bias": facts.has("output.bias"), "num_local_experts": experts["num_local_experts"]}
    return _phi3(facts, config) | experts | more | {"model_type": "phimoe", "rope_scaling": scaling or None}


def _glm4moe(facts: GgufFacts, config: Config) -> Config:
    read = (*SHARED, "leading_dense_block_count", "expert_weights_norm", "expert_weights_scale")
    count, used = experts(facts, expert_gating_func=SIGMOID, **dict.fromkeys(read))
    size = facts.count("expert_feed_forward_length")
    return {
        "model_type": "glm4_moe",
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "n_shared_experts": shared(facts, size),
        "first_k_dense_replace": facts.optional_count("leading_dense_block_count") or 0,
        "routed_scaling_factor": facts.factor("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.get("expert_weights_norm") is not False,
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
    }


def _minimax_m2(facts: GgufFacts, config: Config) -> Config:
    return {"model_type": "minimax_m2", **mixtral_experts(facts, config, expert_gating_func=SIGMOID)}


RMS: Final = "attention.layer_norm_rms_epsilon"
LAYER: Final = "attention.layer_norm_epsilon"


class Architecture(NamedTuple):
    """An architecture of GGUF files."""

    classes: tuple[str, ...]  # what config.json calls it; the first unless `read` says another
    read: Callable[[GgufFacts, Config], Config]  # the entries of config.json that all families do not share
    has_experts: bool = False
    rotates_part: bool = False  # the rotated dimensions may be fewer than a head's: its first ones
    has_scale: bool = False  # `read` reads the scale of attention
    sees_ahead: bool = False  # an encoder
    layers_differ: bool = False  # `read` reads the ropes and the sizes of keys and mlps
    is_latent: bool = False  # `read` reads the sizes of heads
    has_mixers: bool = False  # layers without attention have 0 heads of keys
    epsilon: str = RMS  # key of the number that norms add


ARCHITECTURES: Final = {
    "llama": Architecture(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _llama, has_experts=True),
    "qwen2": Architecture(("Qwen2ForCausalLM",), _plain("qwen2", use_sliding_window=False), rotates_part=True),
    "qwen2moe": Architecture(("Qwen2MoeForCausalLM",), _qwen2moe, has_experts=True, rotates_part=True),
    "qwen3": Architecture(("Qwen3ForCausalLM",), _plain("qwen3", use_sliding_window=False), rotates_part=True),
    "qwen3moe": Architecture(("Qwen3MoeForCausalLM",), _qwen3moe, has_experts=True, rotates_part=True),
    "qwen2vl": Architecture(("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"), _qwen2vl),
    "qwen3vl": Architecture(("Qwen3VLForConditionalGeneration",), _qwen3vl),
    "qwen3vlmoe": Architecture(("Qwen3VLMoeForConditionalGeneration",), _qwen3vlmoe, has_experts=True),
    "qwen3next": Architecture(("Qwen3NextForCausalLM",), _qwen3next, has_experts=True, rotates_part=True),
    "qwen35": Architecture(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _qwen35, rotates_part=True),
    "qwen35moe": Architecture(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        _qwen35moe,
        has_experts=True,
        rotates_part=True,
    ),
    "gemma": Architecture(("GemmaForCausalLM",), _plain("gemma", hidden_activation="gelu_pytorch_tanh")),
    "gemma2": Architecture(("Gemma2ForCausalLM",), _gemma2),
    "gemma3": Architecture(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _gemma3),
    "gemma3n": Architecture(
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), gemma3n, has_scale=True, layers_differ=True
    ),
    "gemma4": Architecture(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        gemma4,
        has_experts=True,
        has_scale=True,
        layers_differ=True,
    ),
    "gemma-embedding": Architecture(("Gemma3TextModel",), _gemma_embedding, sees_ahead=True),
    "granite": Architecture(("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"), _granite, has_scale=True),
    "granitehybrid": Architecture(
        ("GraniteMoeHybridForCausalLM",), _granitehybrid, has_experts=True, has_scale=True, has_mixers=True
    ),
    "granitemoe": Architecture(
        ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _granitemoe, has_experts=True, has_scale=True
    ),
    "phi3": Architecture(("Phi3ForCausalLM",), _phi3, rotates_part=True),
    "phimoe": Architecture(("PhimoeForCausalLM", "PhiMoEForCausalLM"), _phimoe, has_experts=True),
    "smollm3": Architecture(("SmolLM3ForCausalLM",), _plain("smollm3")),
    "gpt-oss": Architecture(("GptOssForCausalLM",), _gpt_oss, has_experts=True),
    "lfm2": Architecture(("Lfm2ForCausalLM",), _lfm2, has_mixers=True),
    "glm4": Architecture(("Glm4ForCausalLM",), _plain("glm4"), rotates_part=True),
    "glm4moe": Architecture(("Glm4MoeForCausalLM",), _glm4moe, has_experts=True, rotates_part=True),
    "deepseek2": Architecture(
        ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"),
        deepseek2,
        has_experts=True,
        is_latent=True,
    ),
    "kimi-linear": Architecture(
        ("KimiLinearForCausalLM",), kimi_linear, has_experts=True, has_mixers=True, is_latent=True
    ),
    "minicpm3": Architecture(("MiniCPM3ForCausalLM",), minicpm3, is_latent=True),
    "falcon-h1": Architecture(("FalconH1ForCausalLM",), falcon_h1),
    "nemotron_h": Architecture(("NemotronHForCausalLM",), nemotron_h, has_mixers=True, layers_differ=True),
    "nemotron_h_moe": Architecture(
        ("NemotronHForCausalLM",), nemotron_h_moe, has_experts=True, has_mixers=True, layers_differ=True
    ),
    "chatglm": Architecture(("GlmForCausalLM",), _plain("glm"), rotates_part=True),
    "mistral3": Architecture(("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), _mistral3),
    "olmo2": Architecture(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _olmo2),
    "olmoe": Architecture(("OlmoeForCausalLM",), _olmoe, has_experts=True),
    "exaone4": Architecture(("Exaone4ForCausalLM",), _exaone4),
    "seed_oss": Architecture(("SeedOssForCausalLM",), _seed_oss),
    "ernie4_5": Architecture(("Ernie4_5ForCausalLM",), _ernie4_5),
    "ernie4_5-moe": Architecture(("Ernie4_5_MoeForCausalLM",), _ernie4_5_moe, has_experts=True),
    "hunyuan-dense": Architecture(("HunYuanDenseV1ForCausalLM",), _plain("hunyuan_v1_dense")),
    "hunyuan-moe": Architecture(("HunYuanMoEV1ForCausalLM",), _hunyuan_moe, has_experts=True),
    "starcoder2": Architecture(("Starcoder2ForCausalLM",), _starcoder2, epsilon=LAYER),
    "cohere2": Architecture(("Cohere2ForCausalLM",), _cohere2, epsilon=LAYER),
    "command-r": Architecture(("CohereForCausalLM",), _command_r, epsilon=LAYER),
    "arcee": Architecture(("ArceeForCausalLM",), _plain("arcee", hidden_act="relu2")),
    "apertus": Architecture(("ApertusForCausalLM",), _plain("apertus", hidden_act="xielu")),
    "minimax-m2": Architecture(("MiniMaxM2ForCausalLM",), _minimax_m2, has_experts=True, rotates_part=True),
}
