"""The fused kernels that a device can use: those in Triton, if they compute what their references do here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.extras import is_installed
from tureen.log import get_logger

TOLERANCE = 0.05
"""Largest difference from a reference, of numbers around 1 in 16 bits, with which a kernel is used."""
PROBED_ROWS = 3

log = get_logger("kernels")


class FusedKernels(NamedTuple):
    """Kernels by what they compute."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float, float], Tensor]  # see triton/norm.py
    activate_and_mul: Callable[[Tensor, str], Tensor]  # see triton/activation.py
    activations: frozenset[str]  # by their names in a model's config


DrawKernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Draws token ids [rows] from logits, peaks, temperatures and uniforms; see triton/sample.py."""


def find_fused(device: torch.device, dtype: torch.dtype, hidden_size: int) -> FusedKernels | None:
    """Returns the fused kernels for a device, after a probe of each; None without any. Logs the reason in one line."""
    fault = why_no_triton()
    if fault:
        log.warning("Triton's kernels are not used, which makes steps slower: %s", fault)
        return None
    norm, activation = (importlib.import_module(f"tureen.kernels.triton.{name}") for name in ("norm", "activation"))
    kernels = FusedKernels(norm.add_norm, activation.activate_and_mul, frozenset(activation.FUNCTIONS))
    generator = torch.Generator(device).manual_seed(0)

    def rows(size: int) -> Tensor:
        return torch.randn(PROBED_ROWS, size, generator=generator, device=device).to(dtype)

    def probe() -> bool:
        weight, added = torch.ones(hidden_size, device=device), rows(hidden_size)
        x, gated = rows(hidden_size), rows(2 * hidden_size)
        pairs = [(kernels.add_norm(x, None, weight, 1e-5, 1.0), norm.reference(x, None, weight, 1e-5))]
        pairs += [(kernels.add_norm(x.clone(), added, weight, 1e-5, 1.0), norm.reference(x, added, weight, 1e-5))]
        pairs += [
            (kernels.activate_and_mul(gated, name), activation.reference(gated.clone(), name))
            for name in kernels.activations
        ]
        return all(are_near(result, expected) for result, expected in pairs)

    return kernels if probe_passes("norms and activations", probe) else None


def find_draw(device: torch.device, vocab_size: int) -> DrawKernel | None:
    """Returns a kernel that draws tokens on a device, after a probe; None without one. Logs the reason in one line."""
    if why_no_triton():
        return None  # `find_fused` logs the reason
    sample = importlib.import_module("tureen.kernels.triton.sample")
    generator = torch.Generator(device).manual_seed(0)

    def probe() -> bool:
        logits = torch.randn(PROBED_ROWS, vocab_size, generator=generator, device=device)
        uniforms = torch.rand(PROBED_ROWS, generator=generator, device=device, dtype=torch.float64)
        inputs = logits, logits.amax(dim=1), torch.ones_like(uniforms), uniforms
        return torch.equal(sample.draw(*inputs).token_ids, sample.reference(*inputs).token_ids)

    def draw(logits: Tensor, peaks: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
        tokens: Tensor = sample.draw(logits, peaks, temperatures, uniforms).token_ids
        return tokens

    return draw if probe_passes("draws", probe) else None


def why_no_triton() -> str:
    """Returns why Triton cannot be used, or "" if it can."""
    if not is_installed("triton"):
        return "Triton is not installed: pip install triton"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return ""


def are_near(result: Tensor, expected: Tensor) -> bool:
    return torch.allclose(result.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE)


def probe_passes(what: str, probe: Callable[[], bool]) -> bool:
    """Returns whether a probe of Triton kernels passes. If not, logs the reason in one line."""
    failures: tuple[type[Exception], ...] = (RuntimeError, OSError, importlib.import_module("triton").TritonError)
    try:
        if probe():
            return True
        fault = "a kernel differs from its reference"
    except failures as error:
        fault = str(error).strip().partition("\n")[0] or type(error).__name__
    log.warning("Triton's kernels for %s are not used, which makes steps slower: %s", what, fault)
    return False
