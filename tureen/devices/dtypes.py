"""Chooses the type that torch computes in best on a device."""

from __future__ import annotations

import os
import platform

import torch

from tureen.devices.base import DeviceInfo

EMULATED = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN has bfloat16, but computes it by float32."""


def default_dtype(device: DeviceInfo) -> torch.dtype:
    """Returns a 16-bit type where the hardware multiplies matrices of it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


def has_onednn() -> bool:
    """Says whether this torch has oneDNN."""
    return bool(torch._C._has_mkldnn)


def has_onednn_bfloat16() -> bool:
    """Says whether oneDNN multiplies bfloat16 here, fast or not; it honours ONEDNN_MAX_CPU_ISA."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fast_bfloat16() -> bool:
    """Says whether the processor has instructions for bfloat16 that oneDNN may use.

    On x86 oneDNN takes bfloat16 wherever there is AVX-512; without AVX512_BF16, which every processor with AMX has, it
    converts to float32, at half the speed of float32 weights.
    """
    if not has_onednn_bfloat16():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return limit not in EMULATED and bool(torch.cpu._is_avx512_bf16_supported())
