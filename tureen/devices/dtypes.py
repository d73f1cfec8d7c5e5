"""The type that torch computes in best on a device."""

from __future__ import annotations

import torch

from tureen.devices.base import DeviceInfo


def default_dtype(device: DeviceInfo) -> torch.dtype:
    """A 16-bit type where matrix products in it are done by the hardware, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


def has_onednn() -> bool:
    return bool(torch._C._has_mkldnn)


def has_fast_bfloat16() -> bool:
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
