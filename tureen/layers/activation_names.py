"""The names of activations, as a model's config has them, and their constants. No torch."""

from __future__ import annotations

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu2")
"""Activations that an mlp may have with a gate and without. Families name the others: xielu, clamped_swiglu."""
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The parameters of xIELU, which checkpoints keep with the weights (arXiv:2411.13010)."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The constants of clamped SwiGLU (gpt-oss, arXiv:2508.10925); rowwise.cpp has the same."""
