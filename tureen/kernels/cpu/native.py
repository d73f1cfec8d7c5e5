"""Finds and loads the native kernels, if this installation has them. No torch."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

NAME = "tureen.kernels.cpu._native"
MISSING = (
    "this installation has no native CPU kernels: they could not be built when it was installed. They need a C++17 "
    "compiler and Python's headers (Debian: apt-get install g++ python3-dev). Then install tureen again, in a checkout "
    "with make native; pip's -v shows why a build fails"
)

FLOAT_ISAS = ("portable", "neon", "i8mm")
"""Instruction sets whose products of 16-bit integers are no faster than those of float32."""


def is_built() -> bool:
    """Says whether this installation has the extension module. Does not load it."""
    return importlib.util.find_spec(NAME) is not None


def load() -> ModuleType | None:
    """Returns the extension module, or None where it was not built.

    Raises RuntimeError when TUREEN_CPU_ISA cannot run here, ImportError when the system's libraries are too old for it.
    """
    try:
        module = importlib.import_module(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        return None
    module.isa()
    return module


def require() -> ModuleType:
    """Returns the extension module. Raises RuntimeError where it was not built."""
    module = load()
    if module is None:
        raise RuntimeError(MISSING)
    return module


def matrix_dtype(dtype: str) -> str:
    """Returns the type of an encoder's matrices for a value of --dtype: int16 where that is faster, unless float32 is
    asked for. Raises as `require`."""
    return "int16" if dtype != "float32" and require().isa() not in FLOAT_ISAS else "float32"
