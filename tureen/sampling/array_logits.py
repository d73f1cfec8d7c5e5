"""Logits for processors where torch is not installed: numpy arrays that have the tensor methods most processors call.

A method is that of `torch.Tensor` with the same name; given `axis`, as numpy calls its own, it is numpy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

HINT = "needs pip install 'tureen[torch]'"
"""The end of the error for a method that is not here. Clients see the first 64 characters of an error."""


class Device(NamedTuple):
    """The place of an array, in the way of a tensor."""

    type: str = "cpu"


class ValuesAndIndices(NamedTuple):
    """The result of `max`, `min`, `sort` and `topk` along a dimension."""

    values: ArrayLogits
    indices: ArrayLogits


_Array: Any = np.ndarray  # its methods have other arguments than a tensor's


class ArrayLogits(_Array):  # type: ignore[misc]
    """An array with methods of a tensor."""

    device = Device()
    is_cuda = False
    requires_grad = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} {HINT}")

    def __repr__(self) -> str:
        return f"ArrayLogits({np.asarray(self)})"

    __str__ = __repr__

    # Size and type.

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> Any:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def to(self, *places: Any, dtype: Any = None, **_: Any) -> Any:
        """Converts to a type; there is one device."""
        dtype = next((place for place in places if isinstance(place, np.dtype)), dtype)
        return self if dtype is None else self.astype(dtype, copy=False)

    def cpu(self) -> Any:
        return self

    detach = contiguous = cpu

    def numpy(self) -> Any:
        return np.asarray(self)

    def clone(self) -> Any:
        return self.copy()

    # Shape.

    def view(self, *shape: Any) -> Any:
        """Returns the array in another shape; given a type, it is numpy's."""
        is_shape = all(isinstance(part, int | tuple | list) for part in shape)
        return self.reshape(*shape) if shape and is_shape else super().view(*shape)

    def unsqueeze(self, dim: int) -> Any:
        return wrap(np.expand_dims(np.asarray(self), dim))

    def repeat(self, *sizes: Any, **numpy: Any) -> Any:
        return super().repeat(*sizes, **numpy) if numpy else wrap(np.tile(np.asarray(self), sizes))

    def expand(self, *sizes: int) -> Any:
        padded = (1,) * (len(sizes) - self.ndim) + self.shape
        shape = [own if size == -1 else size for size, own in zip(sizes, padded, strict=True)]
        return wrap(np.broadcast_to(np.asarray(self), shape))

    # In place.

    def fill_(self, value: Any) -> Any:
        self[...] = value
        return self

    copy_ = fill_

    def zero_(self) -> Any:
        return self.fill_(0)

    def masked_fill_(self, mask: Any, value: Any) -> Any:
        self[np.broadcast_to(mask, self.shape)] = value
        return self

    def index_fill_(self, dim: int, index: Any, value: Any) -> Any:
        np.moveaxis(self, dim, 0)[np.asarray(index)] = value
        return self

    def scatter_(self, dim: int, index: Any, src: Any = None, *, value: Any = None) -> Any:
        np.put_along_axis(self, np.asarray(index), src if value is None else value, dim)
        return self

    def scatter_add_(self, dim: int, index: Any, src: Any) -> Any:
        places = list(np.indices(np.shape(index)))
        places[dim] = np.asarray(index)
        np.add.at(self, tuple(places), np.broadcast_to(src, np.shape(index)))
        return self

    def clamp_(self, min: Any = None, max: Any = None) -> Any:
        return self.fill_(self.clamp(min, max))

    # Along a dimension.

    def softmax(self, dim: int = -1, dtype: Any = None) -> Any:
        powers = np.exp(self - np.max(np.asarray(self), axis=dim, keepdims=True))
        return wrap(powers / np.sum(np.asarray(powers), axis=dim, keepdims=True)).to(dtype=dtype)

    def log_softmax(self, dim: int = -1, dtype: Any = None) -> Any:
        return wrap(self - self.logsumexp(dim, keepdim=True)).to(dtype=dtype)

    def logsumexp(self, dim: int, keepdim: bool = False) -> Any:
        values = np.asarray(self)
        peak = np.max(values, axis=dim, keepdims=True)
        total = np.log(np.sum(np.exp(values - peak), axis=dim, keepdims=True)) + peak
        return wrap(total if keepdim else np.squeeze(total, dim))

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> ValuesAndIndices:
        ranked = self.sort(dim, descending=largest)
        return ValuesAndIndices(*(wrap(np.take(part, range(k), axis=dim)) for part in ranked))

    def sort(self, dim: Any = -1, descending: bool = False, stable: bool = False, **numpy: Any) -> Any:
        if numpy:  # np.sort sorts a copy in place
            return super().sort(**numpy)
        indices = self.argsort(dim, descending)
        return ValuesAndIndices(self.gather(dim, indices), indices)

    def argsort(self, dim: Any = -1, descending: bool = False, stable: bool = False, **numpy: Any) -> Any:
        if numpy:
            return super().argsort(**numpy)
        values = np.asarray(self)
        return wrap(np.argsort(-values if descending else values, axis=dim, kind="stable"))

    def gather(self, dim: int, index: Any) -> Any:
        return wrap(np.take_along_axis(np.asarray(self), np.asarray(index), dim))

    def index_select(self, dim: int, index: Any) -> Any:
        return wrap(np.take(np.asarray(self), np.asarray(index), axis=dim))

    def max(self, dim: Any = None, keepdim: bool = False, **numpy: Any) -> Any:
        return self._extreme(np.max, np.argmax, dim, keepdim, numpy)

    def min(self, dim: Any = None, keepdim: bool = False, **numpy: Any) -> Any:
        return self._extreme(np.min, np.argmin, dim, keepdim, numpy)

    def _extreme(self, best: Any, place: Any, dim: Any, keepdim: bool, numpy: Any) -> Any:
        values = np.asarray(self)
        if numpy or dim is None:
            return wrap(best(values, **numpy))
        return ValuesAndIndices(
            wrap(best(values, axis=dim, keepdims=keepdim)), wrap(place(values, axis=dim, keepdims=keepdim))
        )

    # Numbers.

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        return wrap(np.clip(np.asarray(self), min, max))

    def masked_fill(self, mask: Any, value: Any) -> Any:
        return self.clone().masked_fill_(mask, value)

    def scatter(self, dim: int, index: Any, src: Any = None, *, value: Any = None) -> Any:
        return self.clone().scatter_(dim, index, src, value=value)

    def where(self, condition: Any, other: Any) -> Any:
        return wrap(np.where(condition, self, other).astype(self.dtype, copy=False))

    def nonzero(self, as_tuple: bool = False) -> Any:
        places = np.nonzero(np.asarray(self))
        return places if as_tuple else wrap(np.stack(places, axis=-1))

    def new_full(self, size: Any, value: Any, **_: Any) -> Any:
        return wrap(np.full(size, value, self.dtype))

    def new_zeros(self, *size: Any, **_: Any) -> Any:
        return self.new_full(size if isinstance(size[0], int) else size[0], 0)

    def new_tensor(self, values: Any, **_: Any) -> Any:
        return wrap(np.array(values, self.dtype))


def wrap(values: Any) -> Any:
    """Returns an array as ArrayLogits. A single number stays what it is: it has numpy's `item`."""
    return np.asarray(values).view(ArrayLogits) if np.ndim(values) else values


def from_array(values: Any) -> ArrayLogits:
    """Returns the same memory as ArrayLogits."""
    array: Any = np.asarray(values).view(ArrayLogits)
    return cast("ArrayLogits", array)


def take_over(result: Any, rows: ArrayLogits) -> None:
    """Writes a processor's result into rows. Raises TypeError, ValueError for a result that is none."""
    if not isinstance(result, np.ndarray):
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    if result.shape != rows.shape:
        raise ValueError(f"it returned the shape {list(result.shape)}, not {list(rows.shape)}")
    if result is not rows:
        rows[...] = result


def warm_up() -> None:
    """Does once what loads modules at its first use."""
    logits = from_array(np.zeros((2, 8), np.float32))
    logits.softmax(-1).topk(2), logits.sort(), logits.cumsum(-1), str(logits), logits.sum(-1).tolist()


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: wrap(function(np.asarray(self), *others))


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self.fill_(function(np.asarray(self), *others))


def _reducing(function: Callable[..., Any], **always: Any) -> Callable[..., Any]:
    """Returns a method that takes `dim` and `keepdim`, or numpy's names."""

    def method(self: ArrayLogits, dim: Any = None, keepdim: bool = False, **numpy: Any) -> Any:
        if not numpy:
            numpy = always | {"axis": dim} | ({"keepdims": True} if keepdim else {})
        return wrap(function(np.asarray(self), **numpy))

    return method


def _sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "abs": np.abs, "tanh": np.tanh, "sigmoid": _sigmoid,
    "neg": np.negative, "pow": np.power, "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "logical_not": np.logical_not,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip
"""Methods that are functions of numpy, number by number; those that change types aside, with `_` they work in place."""

REDUCING: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sum": (np.sum, {}), "mean": (np.mean, {}), "prod": (np.prod, {}), "any": (np.any, {}), "all": (np.all, {}),
    "argmax": (np.argmax, {}), "argmin": (np.argmin, {}), "cumsum": (np.cumsum, {}),
    "std": (np.std, {"ddof": 1}), "var": (np.var, {"ddof": 1}),
}  # fmt: skip
"""Methods that take `dim`."""

CONVERSIONS = {"float": "f4", "double": "f8", "half": "f2", "long": "i8", "int": "i4", "bool": "?"}
"""Methods that convert, and the types that the stand-in has under these names -> numpy's."""


def _converting(code: str) -> Callable[..., Any]:
    return lambda self: self.astype(code, copy=False)


for _name, _code in CONVERSIONS.items():
    setattr(ArrayLogits, _name, _converting(_code))
for _name, _function in ELEMENTWISE.items():
    setattr(ArrayLogits, _name, _elementwise(_function))
    setattr(ArrayLogits, f"{_name}_", _in_place(_function))
for _name, (_function, _always) in REDUCING.items():
    setattr(ArrayLogits, _name, _reducing(_function, **_always))
