"""Checkpoints in 8-bit floats (E4M3): those of DeepSeek, Qwen and vLLM (fp8), and of FBGEMM.

A matrix is stored as `weight` and what its values are multiplied with: `weight_scale`, or `weight_scale_inv` where each
block of `weight_block_size` has its own, else one for all or one for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tureen.weights import quantised
from tureen.weights.modules import FLOATS, Module
from tureen.weights.stored import Stored

METHODS = ("fp8", "fbgemm_fp8")
SCALES = ("weight_scale", "weight_scale_inv")


def reader(settings: Mapping[str, Any]) -> Callable[[Module], Stored | None]:
    """Returns a function that makes a module's weight from its tensors, and None for a module that is not quantised.

    Raises StartupError naming the setting that is not supported, or a tensor that is missing or misshapen.
    """
    quantised.setting(settings, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    quantised.setting(settings, "scale_fmt", "float", "ue8m0", default="float")
    quantised.setting(settings, "expert_dtype", "fp8", default="fp8")
    has_blocks = settings.get("weight_block_size") is not None
    block = quantised.block(settings, "weight_block_size") if has_blocks else None
    return lambda module: _weight(module, block)


def _weight(module: Module, block: list[int] | None) -> Stored | None:
    module.drop("activation_scale", *quantised.OF_ACTIVATIONS)
    scale = next((part for part in SCALES if part in module.parts), None)
    weight = module.parts.get("weight")
    is_fp8 = weight is not None and weight.info.encoding.name.startswith("F8_")
    if scale is None and not is_fp8:
        return None
    return fp8_weight(module, scale or SCALES[bool(block)], block)


def fp8_weight(module: Module, scale: str, block: list[int] | None) -> Stored:
    """Makes the weight of a module. scale: the part that holds the scales. block: the rows and columns that share one;
    None: read from the scales' shape."""
    weight = module.take("weight", ("F8_E4M3",))
    rows, cols = weight.shape
    if block is not None:
        scales = module.take(scale, FLOATS, (-(-rows // block[0]), -(-cols // block[1])))
    else:
        scales = module.take(scale, FLOATS, *quantised.whole_or_by_row(rows)).reshape(-1, 1)
        block = [rows // scales.shape[0], cols]
    return quantised.from_fp8(module, weight, scales, (block[0], block[1]))
