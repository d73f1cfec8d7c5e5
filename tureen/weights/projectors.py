"""Kinds of mmproj files: what config.json and preprocessor_config.json say of each, and the names that tensors have in
checkpoints.

Sources: llama.cpp's converter (conversion/) and loader (tools/mtmd/clip.cpp). What files do not say is as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from tureen.errors import echo
from tureen.weights.gguf_facts import GgufFacts
from tureen.weights.gguf_rope import with_sections

Parts = tuple[dict[str, Any], dict[str, Any]]
"""Entries of config.json, and of preprocessor_config.json without mean and deviation."""
EPS_KEY: Final = "vision.attention.layer_norm_epsilon"
QWEN2_PIXELS, QWEN3_PIXELS = (56 * 56, 28 * 28 * 128**2), (256**2, 4096**2)
"""The least and the most pixels of a picture, as published; files do not say them."""
QWEN_WINDOW: Final = 112
"""Pixels along the side of a window of every published Qwen2.5-VL."""
MERGE: Final = 2
"""Patches along the side of a token, if a file does not say it."""
QWEN3_TYPES: Final = {
    "qwen3vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
    "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
}
"""Architectures of GGUF files -> architecture and model_type of config.json."""
ABSENT_EPS, SIGLIP_EPS = 1e-5, 1e-6
"""The epsilon that the converter writes for a SigLIP whose config.json names none, and the one that SigLIP has then."""
PIXTRAL_EPS: Final = 1e-5
GEMMA3_POOLED: Final = 4
"""Features along the side of a square that Gemma 3 averages, if a file does not say it."""
SIDES_OF_TILES: Final = 4
"""Tiles along the longest side of a picture of Idefics3 and SmolVLM, if a file does not say it."""
GEMMA4_POOLED: Final = 3
"""Features along the side of a square that Gemma 4 averages, if a file does not say it."""
GEMMA4_THETA: Final = 100.0
"""The base of the rotation's frequencies in every published Gemma 4; files do not say it."""
GEMMA4_BOUNDS: Final = tuple(f"{way}_{end}" for way in ("input", "output") for end in ("min", "max"))
"""Last parts of the names of the bounds of what goes into products and comes out of them."""
PADDING: Final = "tokenizer.ggml.padding_token_id"


class ProjectorKind(NamedTuple):
    """A kind of mmproj file. Names are those of Hugging Face checkpoints, without `.weight` and the like."""

    architectures: tuple[str, ...]  # of the GGUF files that it goes with
    placeholder: str  # the token that stands for a picture
    placeholder_key: str  # its key in config.json
    read: Callable[[GgufFacts, GgufFacts, Mapping[str, Any]], Parts]  # facts of both files, and the text model's config
    names: Mapping[str, str]
    layer: str  # beginning of the names of a layer, with {} for its number
    layer_names: Mapping[str, str]
    joins_qkv: bool = False  # the checkpoint has q, k and v in one matrix, the file may have three
    interleaves: bool = False  # the file has the two halves of each head's rows of q and k interleaved
    plus_one: tuple[str, ...] = ()  # tensors whose values are those of the checkpoint plus 1
    unused: Mapping[str, str] = {}  # tensors that the language model has, too -> the tokens that they embed
    whole_names: Mapping[str, str] = MappingProxyType({})  # full names of tensors whose last parts differ, too
    scalars: tuple[str, ...] = ()  # last parts of the names of single numbers, of which the file has vectors
    colours_last: bool = False  # the checkpoint has the colours of each pixel of a patch together, the file apart
    may_hear: bool = False  # the file may have an audio encoder, too, which is left out
    width_of: str = ""  # a matrix that gives embeddings; empty: vision.projection_dim is their width
    may_lack_token: bool = False  # the model's vocabulary may be without the placeholder, which is text then


def _qwen2(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    tower, hidden = _qwen(facts), facts.count("vision.embedding_length")
    ratio = (inner_size(facts)[0] + 0.5) / hidden  # whose product is rounded down
    vision = {**tower, "embed_dim": hidden, "hidden_size": config["hidden_size"], "mlp_ratio": ratio}
    return _qwen_parts("Qwen2VLForConditionalGeneration", "qwen2_vl", vision), _qwen_pictures(facts, QWEN2_PIXELS)


def _qwen25(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    every = facts.count("vision.n_wa_pattern")
    vision = {
        **_qwen(facts),
        **_widths(facts, config),
        "window_size": facts.count("vision.window_size", QWEN_WINDOW),
        "fullatt_block_indexes": list(range(every - 1, facts.count("vision.block_count"), every)),
    }
    return _qwen_parts("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", vision), _qwen_pictures(facts, QWEN2_PIXELS)


def _qwen3(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    patch = facts.count("vision.patch_size")
    flags = facts.flags("vision.is_deepstack_layers", facts.count("vision.block_count")) or []
    deep = [layer for layer, is_deep in enumerate(flags) if is_deep]
    expected = text.get("n_deepstack_layers") or 0
    if len(deep) != expected:
        raise facts.fault(
            f"clip.vision.is_deepstack_layers has {len(deep)} layers, but {text.architecture}.n_deepstack_layers of "
            f"the model is {echo(expected)}: the files do not belong together"
        )
    vision = {
        **_qwen(facts),
        **_widths(facts, config),
        "num_position_embeddings": (facts.count("vision.image_size") // patch) ** 2,
        "deepstack_visual_indexes": deep,
    }
    own = _qwen_parts(*QWEN3_TYPES[text.architecture], vision)
    if text.architecture.startswith("qwen35"):
        pairs = int(config["head_dim"] * config["partial_rotary_factor"]) // 2
        own["text_config"] = {**config, "rope_scaling": with_sections(text, config, pairs, alternate=True)}
    return own, _qwen_pictures(facts, QWEN3_PIXELS)


def _qwen(facts: GgufFacts) -> dict[str, Any]:
    """Returns what Qwens share. Their norms' epsilon is fixed; the file has the language model's."""
    for unused in (EPS_KEY, "vision.image_size"):
        facts.stored(unused)
    return {
        "depth": facts.count("vision.block_count"),
        "num_heads": _heads(facts, 4),
        "hidden_act": _activation(facts, "gelu_pytorch_tanh"),
        "patch_size": facts.count("vision.patch_size"),
        "spatial_merge_size": facts.count("vision.spatial_merge_size", MERGE),
    }


def _widths(facts: GgufFacts, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": facts.count("vision.embedding_length"),
        "intermediate_size": inner_size(facts)[0],
        "out_hidden_size": config["hidden_size"],
    }


def _qwen_parts(architecture: str, model_type: str, vision: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "vision_config": vision}


def _qwen_pictures(facts: GgufFacts, pixels: tuple[int, int]) -> dict[str, Any]:
    least, most = (
        facts.count(f"vision.image_{end}_pixels", default) for end, default in zip(("min", "max"), pixels, strict=True)
    )
    if least > most:
        raise facts.fault(f"clip.vision.image_max_pixels must be at least image_min_pixels, {least}, got {most}")
    size = {"shortest_edge": least, "longest_edge": most}
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": size}


def _idefics3(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    epsilon, side = facts.number(EPS_KEY), facts.count("vision.image_size")
    vision = {
        "model_type": "idefics3_vision",
        **_tower(facts),
        "hidden_act": _activation(facts, "gelu_pytorch_tanh"),
        "layer_norm_eps": SIGLIP_EPS if epsilon == ABSENT_EPS else epsilon,
    }
    own = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "vision_config": vision,
        "scale_factor": facts.count("vision.projector.scale_factor", MERGE),
    }
    longest = facts.count("vision.preproc_image_size", SIDES_OF_TILES * side)
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    return own, {"image_processor_type": "Idefics3ImageProcessor", **sizes}


def _pixtral(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    epsilon = facts.number(EPS_KEY)
    if epsilon != PIXTRAL_EPS:
        raise facts.unsupported(f"clip.{EPS_KEY} must be {PIXTRAL_EPS:g} with pixtral, got {epsilon:g}")
    vision = {
        "model_type": "pixtral",
        **_tower(facts),
        "hidden_act": _activation(facts, "gelu"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
    }
    merge = facts.optional_count("vision.spatial_merge_size") or 1
    own: dict[str, Any] = {
        "vision_config": vision,
        "multimodal_projector_bias": facts.has("mm.1.bias"),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    if facts.has("mm.patch_merger.weight"):
        names: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
        own |= names | {"spatial_merge_size": merge}
    elif merge == 1:
        own |= {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    else:
        raise facts.fault(f"clip.vision.spatial_merge_size is {merge}, but there is no tensor 'mm.patch_merger.weight'")
    size = {"longest_edge": facts.count("vision.image_size")}
    return own, {"image_processor_type": "PixtralImageProcessor", "size": size}


def _gemma3(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    side, patch = facts.count("vision.image_size"), facts.count("vision.patch_size")
    vision = {
        "model_type": "siglip_vision_model",
        **_tower(facts),
        "hidden_act": _activation(facts, "gelu_pytorch_tanh"),
        "layer_norm_eps": facts.number(EPS_KEY),
    }
    own = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": vision,
        "mm_tokens_per_image": (side // patch // facts.count("vision.projector.scale_factor", GEMMA3_POOLED)) ** 2,
    }
    return own, {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}


def _gemma4(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    if (padding := text.file.metadata.get(PADDING, 0)) != 0:
        raise text.unsupported(f"{PADDING} must be 0 in a Gemma 4 with pictures, got {echo(padding)}")
    if (activation := _activation(facts, "gelu_pytorch_tanh")) == "silu":
        raise facts.unsupported(f"clip.use_silu must be false with gemma4v, got {activation}")
    heads, hidden = _heads(facts, 4), facts.count("vision.embedding_length")
    facts.stored("vision.image_size")  # the converter writes a number that nothing uses
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": hidden,
        "intermediate_size": inner_size(facts)[0],
        "num_hidden_layers": facts.count("vision.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "patch_size": facts.count("vision.patch_size"),
        "pooling_kernel_size": facts.count("vision.projector.scale_factor", GEMMA4_POOLED),
        "position_embedding_size": _num_positions(facts, hidden),
        "hidden_activation": "gelu_pytorch_tanh",  # without a key, too: files leave it out
        "rms_norm_eps": facts.number(EPS_KEY),
        "rope_parameters": {"rope_type": "axial", "rope_theta": GEMMA4_THETA},
        "use_clipped_linears": any(
            name.startswith("v.") and name.endswith(GEMMA4_BOUNDS) for name in facts.file.tensors
        ),
        "standardize": facts.has("v.std_bias") or facts.has("v.std_scale"),
    }
    # No key says whether layers see pictures whole. Of the published models, 26B-A4B and 31B do. E2B and E4B do not,
    # and they alone have embeddings per layer.
    is_whole = not config["hidden_size_per_layer_input"]
    own = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "vision_config": vision,
        "text_config": {**config, "use_bidirectional_attention": "vision" if is_whole else None},
    }
    return own, {"image_processor_type": "Gemma4ImageProcessor", "do_normalize": True}


def _num_positions(facts: GgufFacts, hidden: int) -> int:
    """Returns the number of positions in the tables of columns and of rows."""
    name = "v.position_embd.weight"
    shape = facts.file.tensors[name].shape if facts.has(name) else ()
    if len(shape) != 3 or shape[::2] != (2, hidden):
        raise facts.fault(f"tensor '{name}' must be two tables with rows of {hidden} (clip.vision.embedding_length)")
    return int(shape[1])


def _llava(facts: GgufFacts, text: GgufFacts, config: Mapping[str, Any]) -> Parts:
    for unused in ("vision.projection_dim", "vision.image_crop_resolution", "vision.image_split_resolution"):
        facts.stored(unused)  # CLIP's own, and what training used
    if not facts.has("v.class_embd"):
        raise facts.unsupported("an encoder other than CLIP, without tensor 'v.class_embd', is not supported with mlp")
    has_tiles, side = facts.has("model.image_newline"), facts.count("vision.image_size")
    _one_of(facts, "vision.mm_projector_type", None, "mlp2x_gelu")
    _one_of(facts, "vision.image_aspect_ratio", None, "anyres" if has_tiles else "pad")
    _one_of(facts, "vision.mm_patch_merge_type", None, "spatial_unpad" if has_tiles else "flat")
    vision = {
        "model_type": "clip_vision_model",
        **_tower(facts),
        "hidden_act": _activation(facts, "gelu"),
        "layer_norm_eps": facts.number(EPS_KEY),
    }
    own = {
        "vision_config": vision,
        # The converter leaves out the last layer and the norm after it: features are those of the last but one.
        "vision_feature_layer": -2 if facts.has("v.post_ln.weight") else -1,
        "vision_feature_select_strategy": "default",
    }
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    if not has_tiles:
        names: dict[str, Any] = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
        return own | names, {"image_processor_type": "LlavaImageProcessor", "do_pad": True, **sizes}
    names = {"architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next"}
    return own | names | {"image_grid_pinpoints": _grid(facts)}, {
        "image_processor_type": "LlavaNextImageProcessor",
        **sizes,
    }


def _grid(facts: GgufFacts) -> list[list[int]]:
    """Returns the sizes that a picture may get: [height, width] of each, of which the file has width and height."""
    key = "vision.image_grid_pinpoints"
    stored = facts.stored(key)
    numbers = stored.tolist() if isinstance(stored, np.ndarray) and stored.dtype.kind in "iu" else []
    if not numbers or len(numbers) % 2:
        raise facts.fault(f"clip.{key} must be pairs of integers, got {numbers[:8] or echo(stored)}")
    return [[height, width] for width, height in zip(numbers[::2], numbers[1::2], strict=True)]


def _one_of(facts: GgufFacts, key: str, *known: object) -> None:
    """Raises StartupError unless a key has one of these values; None: the file is without it."""
    if (value := facts.get(key)) not in known:
        raise facts.unsupported(f"clip.{key} must be {known[-1]}, got {echo(value)}")


def _tower(facts: GgufFacts) -> dict[str, Any]:
    return {
        "hidden_size": facts.count("vision.embedding_length"),
        "intermediate_size": inner_size(facts)[0],
        "num_hidden_layers": facts.count("vision.block_count"),
        "num_attention_heads": _heads(facts, 1),
        "image_size": facts.count("vision.image_size"),
        "patch_size": facts.count("vision.patch_size"),
    }


def _heads(facts: GgufFacts, parts: int) -> int:
    """Returns the number of heads; the sizes of heads must be multiples of `parts`."""
    hidden, heads = facts.count("vision.embedding_length"), facts.count("vision.attention.head_count")
    if hidden % (parts * heads):
        each = f" x {parts}" if parts > 1 else ""
        raise facts.fault(
            f"clip.vision.embedding_length {hidden} is not a multiple of attention.head_count{each}, {parts * heads}"
        )
    return heads


def _activation(facts: GgufFacts, gelu: str) -> str:
    """Returns the activation; gelu: the one that `clip.use_gelu` means."""
    flags = [facts.get("use_gelu"), facts.get("use_silu")]
    if any(flag not in (None, False, True) for flag in flags) or flags == [True, True]:
        raise facts.fault(f"clip.use_gelu and clip.use_silu must be flags, at most one of them true, got {flags}")
    if flags[0]:
        return gelu
    return "silu" if flags[1] else "quick_gelu"


def inner_size(facts: GgufFacts) -> tuple[int, bool]:
    """Returns the inner size of an mlp, and whether its two matrices have each other's name, as in older files."""
    name, hidden = "v.blk.0.ffn_up.weight", facts.count("vision.embedding_length")
    tensor = facts.file.tensors.get(name)
    shape = () if tensor is None else tensor.shape
    if len(shape) != 2 or hidden not in shape:
        raise facts.fault(f"tensor '{name}' must be a matrix with a side of {hidden} (clip.vision.embedding_length)")
    if shape[0] == shape[1]:
        raise facts.unsupported(f"tensor '{name}' is square, so it cannot be distinguished from 'ffn_down'")
    is_swapped = shape[0] == hidden
    return (shape[1] if is_swapped else shape[0]), is_swapped


QWEN: Final[Mapping[str, Any]] = {
    "placeholder": "<|image_pad|>",
    "placeholder_key": "image_token_id",
    "names": {
        "v.patch_embd": "visual.patch_embed.proj",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
        "v.deepstack.{}.norm": "visual.deepstack_merger_list.{}.norm",
        "v.deepstack.{}.fc1": "visual.deepstack_merger_list.{}.linear_fc1",
        "v.deepstack.{}.fc2": "visual.deepstack_merger_list.{}.linear_fc2",
    },
    "layer": "visual.blocks.{}.",
    "layer_names": {
        "ln1": "norm1",
        "ln2": "norm2",
        "attn_qkv": "attn.qkv",
        "attn_out": "attn.proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "joins_qkv": True,
}
"""The fields that projectors of Qwens share."""
SIGLIP: Final = {
    "v.patch_embd": "vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_model.embeddings.position_embedding",
    "v.post_ln": "vision_model.post_layernorm",
}
SIGLIP_LAYER: Final = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Names of a SigLIP, and of its layers."""
PROJECTORS: Final = {
    "qwen2vl_merger": ProjectorKind(("qwen2vl",), read=_qwen2, **QWEN),
    "qwen2.5vl_merger": ProjectorKind(("qwen2vl",), read=_qwen25, **QWEN),
    "qwen3vl_merger": ProjectorKind(tuple(QWEN3_TYPES), read=_qwen3, **QWEN),
    "idefics3": ProjectorKind(
        ("llama",),
        "<image>",
        "image_token_id",
        _idefics3,
        {
            **SIGLIP,
            "mm.model.fc": "connector.modality_projection.proj",
        },
        "vision_model.encoder.layers.{}.",
        SIGLIP_LAYER,
    ),
    "gemma3": ProjectorKind(
        ("gemma3",),
        "<start_of_image>",
        "boi_token_index",
        _gemma3,
        {
            **{name: f"vision_tower.{own}" for name, own in SIGLIP.items()},
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        "vision_tower.vision_model.encoder.layers.{}.",
        SIGLIP_LAYER,
        plus_one=("mm.soft_emb_norm.weight",),
        whole_names={"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"},
    ),
    "gemma4v": ProjectorKind(
        ("gemma4",),
        "<|image|>",
        "image_token_id",
        _gemma4,
        {
            "v.patch_embd": "vision_tower.patch_embedder.input_proj",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        "vision_tower.encoder.layers.{}.",
        {
            "ln1": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
            **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
            "attn_out": "self_attn.o_proj",
            **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        whole_names={
            "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
            "v.std_bias": "vision_tower.std_bias",
            "v.std_scale": "vision_tower.std_scale",
        },
        scalars=GEMMA4_BOUNDS,
        colours_last=True,
        may_hear=True,
    ),
    "mlp": ProjectorKind(
        ("llama",),
        "<image>",
        "image_token_index",
        _llava,
        {
            **{name: f"vision_tower.{own}" for name, own in SIGLIP.items()},
            "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        "vision_tower.vision_model.encoder.layers.{}.",
        SIGLIP_LAYER,
        whole_names={
            "v.class_embd": "vision_tower.vision_model.embeddings.class_embedding",
            "model.image_newline": "image_newline",
        },
        width_of="mm.2.weight",
        may_lack_token=True,
    ),
    "pixtral": ProjectorKind(
        ("llama", "mistral3"),
        "[IMG]",
        "image_token_index",
        _pixtral,
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        "vision_tower.transformer.layers.{}.",
        {
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            **{f"attn_{part}": f"attention.{part}_proj" for part in ("q", "k", "v")},
            "attn_out": "attention.o_proj",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        interleaves=True,
        unused={"v.token_embd.img_break": "[IMG_BREAK]"},
    ),
}
"""Values of clip.projector_type -> kinds."""
