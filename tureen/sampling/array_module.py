"""A module that stands in for torch where it is not installed, for processors of clients that have it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tureen.sampling.array_logits import CONVERSIONS, ELEMENTWISE, HINT, REDUCING, ArrayLogits, Device, from_array, wrap

FUNCTIONS = (
    *ELEMENTWISE, *REDUCING, "softmax", "log_softmax", "logsumexp", "topk", "sort", "argsort", "gather", "max", "min",
    "clamp", "masked_fill", "scatter", "nonzero", "clone", "numel", "unsqueeze", "index_select",
)  # fmt: skip
"""Methods that the stand-in has as functions, too."""


def modules() -> dict[str, ModuleType]:
    """Returns `torch` and the modules below it that code may name, each with the commonest functions."""
    module = ModuleType("torch")
    for name, code in CONVERSIONS.items():
        kind = np.dtype(code)
        module.__dict__.update({name: kind, kind.name: kind})
    for name in FUNCTIONS:
        setattr(module, name, _function_of(name))
    module.__dict__.update(
        Tensor=ArrayLogits,
        FloatTensor=ArrayLogits,
        inf=math.inf,
        nan=math.nan,
        device=lambda name="cpu", *_: Device(),
        no_grad=contextlib.nullcontext,
        inference_mode=lambda *_: contextlib.nullcontext(),
        is_tensor=lambda value: isinstance(value, ArrayLogits),
        where=lambda condition, chosen, other: wrap(np.where(condition, chosen, other)),
        cat=lambda parts, dim=0: wrap(np.concatenate(parts, axis=dim)),
        stack=lambda parts, dim=0: wrap(np.stack(parts, axis=dim)),
        from_numpy=from_array,
        **_constructors(),
    )
    functional = ModuleType("torch.nn.functional")
    functional.__dict__.update({name: module.__dict__[name] for name in ("softmax", "log_softmax", "sigmoid")})
    nn = ModuleType("torch.nn")
    nn.__dict__["functional"] = functional
    module.__dict__["nn"] = nn
    module.__dict__["__getattr__"] = _missing
    return {"torch": module, "torch.nn": nn, "torch.nn.functional": functional}


def _missing(name: str) -> Any:
    raise AttributeError(f"{name} {HINT}")


def _function_of(name: str) -> Callable[..., Any]:
    return lambda values, *rest, **named: getattr(from_array(values), name)(*rest, **named)


def _constructors() -> dict[str, Callable[..., Any]]:
    """Returns the functions that make arrays; `device` and the like change nothing."""

    def shaped(make: Callable[..., Any]) -> Callable[..., Any]:
        def function(*size: Any, dtype: Any = np.float32, **_: Any) -> ArrayLogits:
            return from_array(make(size[0] if size and not isinstance(size[0], int) else size, dtype=dtype))

        return function

    def like(value: Any) -> Callable[..., Any]:
        return lambda other, dtype=None, **_: from_array(np.full_like(np.asarray(other), value, dtype=dtype))

    def tensor(values: Any, dtype: Any = None, **_: Any) -> Any:
        array = np.array(values, dtype)
        is_plain = dtype is None and array.dtype == np.float64 and not isinstance(values, np.ndarray)
        return from_array(array.astype(np.float32) if is_plain else array)

    def full(size: Any, value: Any, dtype: Any = None, **_: Any) -> Any:
        return tensor(np.full(size, value), dtype or (np.float32 if isinstance(value, float) else None))

    def full_like(other: Any, value: Any, dtype: Any = None, **_: Any) -> ArrayLogits:
        return from_array(np.full_like(np.asarray(other), value, dtype=dtype))

    return {
        "tensor": tensor,
        "as_tensor": tensor,
        "zeros": shaped(np.zeros),
        "ones": shaped(np.ones),
        "empty": shaped(np.empty),
        "full": full,
        "zeros_like": like(0),
        "ones_like": like(1),
        "full_like": full_like,
        "arange": lambda *bounds, dtype=None, **_: from_array(np.arange(*bounds, dtype=dtype)),
    }
