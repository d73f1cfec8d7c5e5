"""What the first CUDA device offers."""

from __future__ import annotations

import torch


def is_available() -> bool:
    return torch.cuda.is_available()


def default_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def free_bytes() -> int:
    """Free device memory; what torch holds in reserve without using it counts as free."""
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
