"""The first CUDA device, as torch sees it."""

from __future__ import annotations

import torch


def is_available() -> bool:
    """Says whether torch can use a CUDA device here."""
    return torch.cuda.is_available()


def why_not() -> str:
    """Returns the reason why it is not available."""
    build = "has no CUDA support" if torch.version.cuda is None else "finds no usable GPU"
    return f"torch {torch.__version__} {build}"


def free_bytes() -> int:
    """Returns the free bytes of device memory; what torch holds in reserve without using it counts as free."""
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
