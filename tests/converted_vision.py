"""What llama.cpp's converter makes of a transformers model that sees: a GGUF file with the language model, and an
mmproj file. Names of tensors and keys are those of the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import converted_gguf
import gguf
import numpy as np
import tiny_gguf

MMPROJ = "mmproj-tiny-f32.gguf"
QWEN2 = ("qwen2_vl", "qwen2_5_vl")
TYPES = gguf.VisionProjectorType
PROJECTORS = {
    "qwen2_vl": TYPES.QWEN2VL,
    "qwen2_5_vl": TYPES.QWEN25VL,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), TYPES.QWEN3VL),
    **dict.fromkeys(("smolvlm", "idefics3"), TYPES.IDEFICS3),
    **dict.fromkeys(("mistral3", "llava"), TYPES.PIXTRAL),
    "gemma3": TYPES.GEMMA3,
    "gemma4": TYPES.GEMMA4V,
}
"""By model_type."""
EYES = (
    "visual.",
    "vision_model.",
    "connector.",
    "vision_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "image_newline",
)
ENDS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
VISION = gguf.Keys.ClipVision


def write_pair(
    folder: Path,
    oracle: Any,
    preprocessor: Mapping[str, Any],
    special: Mapping[str, int],
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Writes both files; returns that of the language model. special: tokens for pictures, and their ids. more:
    metadata of the language model."""
    folder.mkdir(exist_ok=True)
    tiny_gguf.write_gguf(folder / MMPROJ, metadata(oracle, preprocessor), tensors(oracle))
    return write_text(folder / "tiny.gguf", oracle, special, more or {})


def write_llava_pair(
    folder: Path, oracle: Any, preprocessor: Mapping[str, Any], special: Mapping[str, int], **more: Any
) -> Path:
    """Writes both files as llama.cpp's legacy script convert_image_encoder_to_gguf.py does for LLaVA 1.5 and 1.6, whose
    projectors it calls mlp; returns that of the language model. more: metadata of the mmproj file; None: without."""
    folder.mkdir(exist_ok=True)
    eye = oracle.config.vision_config
    grid = getattr(oracle.config, "image_grid_pinpoints", None)
    facts = {
        "general.architecture": "clip",
        "clip.has_text_encoder": False,
        "clip.has_vision_encoder": True,
        "clip.has_llava_projector": True,
        "clip.projector_type": "mlp",
        VISION.IMAGE_SIZE: eye.image_size,
        VISION.PATCH_SIZE: eye.patch_size,
        VISION.EMBEDDING_LENGTH: eye.hidden_size,
        VISION.FEED_FORWARD_LENGTH: eye.intermediate_size,
        VISION.PROJECTION_DIM: 768,  # CLIP's own
        VISION.Attention.HEAD_COUNT: eye.num_attention_heads,
        VISION.Attention.LAYERNORM_EPS: eye.layer_norm_eps,
        VISION.BLOCK_COUNT: eye.num_hidden_layers - 1,
        VISION.IMAGE_MEAN: preprocessor["image_mean"],
        VISION.IMAGE_STD: preprocessor["image_std"],
        "clip.use_gelu": False,
    }
    if grid is not None:
        facts |= {"clip.vision.mm_patch_merge_type": "spatial_unpad", "clip.vision.image_aspect_ratio": "anyres"}
        facts["clip.vision.image_grid_pinpoints"] = [side for height, width in grid for side in (width, height)]
    facts = {key: value for key, value in (facts | more).items() if value is not None}
    tiny_gguf.write_gguf(folder / MMPROJ, facts, _of_llava(oracle))
    return write_text(folder / "tiny.gguf", oracle, special, {})


LLAVA_NAMES = (
    ("embeddings.", ""), ("embedding", "embd"), ("encoder.layers", "blk"), ("self_attn.", "attn_"), ("_proj.", "."),
    ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"), ("layer_norm", "ln"), ("layrnorm", "ln"),
)  # fmt: skip
"""Parts of names that the script replaces."""


def _of_llava(oracle: Any) -> dict[str, np.ndarray]:
    last, found = oracle.config.vision_config.num_hidden_layers - 1, {}
    for full, parameter in oracle.state_dict().items():
        name, array = full.removeprefix("model."), parameter.detach().float().numpy()
        if name == "image_newline":
            found[full] = array
        elif name.startswith("multi_modal_projector."):
            found[
                name.replace("multi_modal_projector.linear_1", "mm.0").replace("multi_modal_projector.linear_2", "mm.2")
            ] = array
        elif name.startswith("vision_tower.") and f".layers.{last}." not in name and "post_layernorm" not in name:
            name = "v." + name.removeprefix("vision_tower.").removeprefix("vision_model.")
            for part, own in LLAVA_NAMES:
                name = name.replace(part, own)
            found[name] = np.ascontiguousarray(array)
    return found


def write_text(path: Path, oracle: Any, special: Mapping[str, int], more: Mapping[str, Any]) -> Path:
    """Writes the language model."""
    config = oracle.config.get_text_config()
    config.tie_word_embeddings = oracle.config.tie_word_embeddings
    state = {
        name.replace("model.language_model.", "model.").replace("model.text_model.", "model."): weight
        for name, weight in oracle.state_dict().items()
        if not name.removeprefix("model.").startswith(EYES)
    }
    config.allow_global_per_layer_attribute_access = True  # layers of a Gemma 4 differ
    inner = getattr(oracle.model, "language_model", None)
    text = SimpleNamespace(config=config, state_dict=lambda: state, model=inner)
    vocabulary = tiny_gguf.byte_vocabulary(config.vocab_size)
    for token, token_id in special.items():
        vocabulary["tokenizer.ggml.tokens"][token_id] = token
        vocabulary["tokenizer.ggml.token_type"][token_id] = tiny_gguf.CONTROL
    found = {gguf_name: array for _, gguf_name, array in converted_gguf.tensors(text)}
    found |= converted_gguf.rope_tensors(config)
    metadata = converted_gguf.metadata(text) | _pictures_of_text(oracle) | vocabulary | dict(more)
    return tiny_gguf.write_gguf(path, metadata, found)


def _pictures_of_text(oracle: Any) -> dict[str, Any]:
    """Returns the metadata of the language model that concern pictures."""
    text = oracle.config.get_text_config()
    architecture = converted_gguf.ARCHITECTURES[text.model_type]
    sections = getattr(text, "rope_parameters", {}).get("mrope_section")
    found = {f"{architecture}.rope.dimension_sections": [*sections, 0]} if sections else {}
    deep = getattr(oracle.config.vision_config, "deepstack_visual_indexes", None)
    if architecture.startswith("qwen3vl"):
        found[f"{architecture}.n_deepstack_layers"] = len(deep)
    return found


def metadata(oracle: Any, preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of the mmproj file."""
    config, eye = oracle.config, oracle.config.vision_config
    kind = PROJECTORS[config.model_type]
    is_qwen = config.model_type.startswith("qwen")
    found = {
        "general.architecture": gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ],
        "general.type": gguf.GGUFType.MMPROJ,
        "general.file_type": 0,
        gguf.Keys.Clip.HAS_VISION_ENCODER: True,
        gguf.Keys.Clip.PROJECTOR_TYPE: kind,
        VISION.PROJECTION_DIM: config.get_text_config().hidden_size,
        VISION.PATCH_SIZE: eye.patch_size,
        VISION.BLOCK_COUNT: eye.depth if is_qwen else eye.num_hidden_layers,
        VISION.Attention.HEAD_COUNT: eye.num_heads if is_qwen else eye.num_attention_heads,
        VISION.Attention.LAYERNORM_EPS: 1e-5 if kind == TYPES.PIXTRAL else 1e-6,
        VISION.IMAGE_MEAN: preprocessor["image_mean"],
        VISION.IMAGE_STD: preprocessor["image_std"],
        **(_of_qwen(config.model_type, eye, preprocessor) if is_qwen else {}),
    }
    if not is_qwen:
        found |= {
            VISION.EMBEDDING_LENGTH: eye.hidden_size,
            VISION.FEED_FORWARD_LENGTH: eye.intermediate_size,
            VISION.IMAGE_SIZE: getattr(eye, "image_size", 224),
        }
    if kind == TYPES.IDEFICS3:
        longest = preprocessor["size"]["longest_edge"]
        found |= {VISION.USE_GELU: True, VISION.PREPROC_IMAGE_SIZE: longest}
        found[VISION.Projector.SCALE_FACTOR] = config.scale_factor
    if kind == TYPES.GEMMA3:
        side = eye.image_size // eye.patch_size
        found |= {VISION.USE_GELU: True, VISION.Attention.LAYERNORM_EPS: eye.layer_norm_eps}
        found[VISION.Projector.SCALE_FACTOR] = side // int(config.mm_tokens_per_image**0.5)
    if kind == TYPES.GEMMA4V:
        found[VISION.PROJECTOR_TYPE] = found.pop(gguf.Keys.Clip.PROJECTOR_TYPE)
        found |= {VISION.Attention.LAYERNORM_EPS: eye.rms_norm_eps}
        found[VISION.Projector.SCALE_FACTOR] = eye.pooling_kernel_size
    if kind == TYPES.PIXTRAL:
        found[VISION.USE_SILU if eye.hidden_act == "silu" else VISION.USE_GELU] = True
        if config.model_type == "mistral3":
            found[VISION.SPATIAL_MERGE_SIZE] = config.spatial_merge_size
    return found


def _of_qwen(model_type: str, eye: Any, preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of Qwens; the converter writes no limits of pictures, but the keys exist."""
    limits = preprocessor["size"]
    found = {VISION.IMAGE_MIN_PIXELS: limits["shortest_edge"], VISION.IMAGE_MAX_PIXELS: limits["longest_edge"]}
    if model_type == "qwen2_vl":
        return found | {
            VISION.EMBEDDING_LENGTH: eye.embed_dim,
            VISION.FEED_FORWARD_LENGTH: eye.hidden_size,  # the converter's mistake: the language model's size
            VISION.IMAGE_SIZE: 560,
        }
    found |= {VISION.EMBEDDING_LENGTH: eye.hidden_size, VISION.FEED_FORWARD_LENGTH: eye.intermediate_size}
    if model_type == "qwen2_5_vl":
        return found | {
            VISION.IMAGE_SIZE: 560,
            VISION.USE_SILU: True,
            VISION.N_WA_PATTERN: eye.fullatt_block_indexes[0] + 1,
            VISION.WINDOW_SIZE: eye.window_size,
        }
    deep = getattr(eye, "deepstack_visual_indexes", None) or []
    return found | {
        VISION.IMAGE_SIZE: int(eye.num_position_embeddings**0.5 * eye.patch_size),
        VISION.USE_GELU: True,
        VISION.SPATIAL_MERGE_SIZE: eye.spatial_merge_size,
        VISION.IS_DEEPSTACK_LAYERS: [layer in deep for layer in range(eye.depth)],
    }


def tensors(oracle: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of the mmproj file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 16)
    found = {}
    for full, parameter in oracle.state_dict().items():
        name = full.removeprefix("model.")
        if not name.startswith(EYES):
            continue
        for hf_name, array in _converted(name, parameter.detach().float().numpy(), oracle.config):
            known = names.get_name(hf_name, ENDS) or names.get_name(f"model.{hf_name}", ENDS)
            found[known or hf_name] = np.ascontiguousarray(array)
    return found


def _converted(name: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names that the `gguf` package knows, or those of tensors, and the values."""
    kind = name.rpartition(".")[2]
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", array[:, :, 0]
        yield "v.patch_embd.weight.1", array[:, :, 1]
    elif ".qkv." in name and config.model_type in QWEN2:
        for part, third in zip("qkv", np.split(array, 3), strict=True):
            yield name.replace("qkv", part), third
    elif name.startswith("visual.deepstack_merger_list."):
        _, _, index, part, _ = name.split(".")
        layer = config.vision_config.deepstack_visual_indexes[int(index)]
        yield f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{kind}", array
    elif name.startswith("visual.merger.linear_fc"):
        yield f"mm.{2 * (int(name.split('.')[2][-1]) - 1)}.{kind}", array
    elif name.startswith("visual.merger.norm."):
        yield f"v.post_ln.{kind}", array
    elif config.model_type == "gemma3":
        name = name.replace("vision_tower.", "vision_tower.vision_model.").replace(
            "projection_weight", "projection.weight"
        )
        yield name, array + name.endswith("soft_emb_norm.weight")
    elif config.model_type == "gemma4":
        yield _of_gemma4(name, array)
    elif name.startswith("vision_tower.") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.vision_config.num_attention_heads
        yield name, array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    else:
        yield name, array


def _of_gemma4(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns the name that the `gguf` package knows, and the values: of patches as a convolution's, [.., 3, y, x]."""
    name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("patch_embedder.input_proj.weight"):
        side = int((array.shape[1] // 3) ** 0.5)
        array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    if name.endswith("position_embedding_table"):
        name += ".weight"
    return name, np.atleast_1d(array)
