"""The type that torch computes in best on a device."""

from __future__ import annotations

import os
import platform

import torch

from tureen.devices.base import DeviceInfo

EMULATED = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Sets of instructions that oneDNN may be held to by ONEDNN_MAX_CPU_ISA: with these it has bfloat16, but by float32."""


def default_dtype(device: DeviceInfo) -> torch.dtype:
    """A 16-bit type where matrix products in it are done by the hardware, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


def has_onednn() -> bool:
    return bool(torch._C._has_mkldnn)


def has_onednn_bfloat16() -> bool:
    """Whether oneDNN multiplies it here, fast or not; it honours ONEDNN_MAX_CPU_ISA."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fast_bfloat16() -> bool:
    """Whether the processor has instructions for it that oneDNN may use.

    On x86 oneDNN takes bfloat16 wherever there is AVX-512; without AVX512_BF16, which every processor with AMX has, it
    converts to float32, at half the speed of float32 weights.
    """
    if not has_onednn_bfloat16():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return limit not in EMULATED and bool(torch.cpu._is_avx512_bf16_supported())
