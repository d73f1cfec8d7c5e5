"""A stand-in for CUDA graphs on CPU tensors: it records operations, and repeats them on the same tensors.

As with a graph, numbers of Python are those of the capture. It refuses what a capture refuses: reading a tensor on the
host, making one of the host's numbers, and shapes that depend on values; and a repetition that has other shapes.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__")
HOST_NUMBERS = ("tensor", "as_tensor", "from_numpy", "frombuffer")
OF_VALUES = ("nonzero", "masked_select", "_unique2", "_local_scalar_dense", "equal")
"""Operations whose shapes or results the host must know."""


class Refused(RuntimeError):
    """What a capture does not allow."""


class Tape:
    """A Recorder."""

    def __init__(self):
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, function):
        self.num_captures += 1
        steps = []
        with forbid_host(), Recording(steps):
            function()

        def replay():
            self.num_replays += 1
            with forbid_host():
                for operation, args, kwargs, results in steps:
                    repeat(operation, args, kwargs, results)

        return without_watch(replay)


def repeat(operation, args, kwargs, results):
    """Repeats an operation, and puts new results where the recorded ones are."""
    for old, new in zip(results, tensors(operation(*args, **kwargs)), strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise Refused(f"{operation}: {tuple(new.shape)}, captured as {tuple(old.shape)}")
        if not old.is_mkldnn and storage(old) != storage(new):
            old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        name = operation.__name__.partition(".")[0]
        if name in OF_VALUES or (
            name.startswith("index") and any(each.dtype == torch.bool for each in tensors(args[1]))
        ):
            raise Refused(f"{name} in a capture")
        result = operation(*args, **(kwargs or {}))
        self._steps.append((operation, args, kwargs or {}, tensors(result)))
        return result


class NoNewTensors(TorchDispatchMode):
    """Refuses memory for tensors."""

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        known = {storage(each) for each in tensors((args, kwargs))}
        if any(storage(each) not in known for each in tensors(result)):
            raise Refused(f"{operation} takes memory between a capture and its replay")
        return result


@contextmanager
def watched():
    """Within it, the code around replays takes no memory for tensors."""
    with NoNewTensors():
        yield


def without_watch(function):
    def run():
        with torch.utils._python_dispatch._disable_current_modes():
            function()

    return run


@contextmanager
def forbid_host():
    """Within it, no tensor is read on the host, and none is made of the host's numbers."""

    def refuse(name):
        def refused(*_args, **_kwargs):
            raise Refused(f"{name} in a capture")

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, refuse(name))
        for name in HOST_NUMBERS:
            patch.setattr(torch, name, refuse(name))
        yield


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
