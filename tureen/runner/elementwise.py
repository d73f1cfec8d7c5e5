"""Functions of numpy arrays, row by row: activations and norms. A row's numbers do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
ERF_SCALE = 0.3275911
"""Coefficients of an approximation of the error function that is off by at most 1.5e-7.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
"""


def gelu(x: Array) -> Array:
    """Computes x times the probability that a standard normal number is below x (arXiv:1606.08415)."""
    size = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(ERF_SCALE) * size)
    series: Any = np.zeros_like(x)
    for coefficient in reversed(ERF):
        series = (series + np.float32(coefficient)) * t
    erf = 1 - series * np.exp(-size * size)
    result: Array = np.float32(0.5) * x * (1 + np.copysign(erf, x))
    return result


def gelu_tanh(x: Array) -> Array:
    """Computes the approximation of `gelu` by the hyperbolic tangent."""
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    result: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


def silu(x: Array) -> Array:
    """Computes x times the logistic function of x."""
    result: Array = x * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x)))
    return result


def relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


def tanh(x: Array) -> Array:
    result: Array = np.tanh(x)
    return result


def identity(x: Array) -> Array:
    return x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
    "relu": relu,
    "tanh": tanh,
    "identity": identity,
}


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Scales each row to mean 0 and variance 1, then by `weight` (arXiv:1607.06450)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normed: Array = centred / np.sqrt(variance + np.float32(eps)) * weight
    return normed if bias is None else normed + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scales each row to a mean square of 1, then by `weight` (arXiv:1910.07467)."""
    square = np.square(x).mean(axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(square + np.float32(eps)) * weight
    return normed
