"""Groups the tensors of a safetensors folder by module: those of one quantised weight may lie in different files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.weights.mapped import TensorInfo
from tureen.weights.safetensors import SafetensorsFile, indexed, weight_files

FLOATS: Final = ("F16", "BF16", "F32")
DTYPES: Final = {
    "U8": "u1", "I8": "i1", "I32": "<u4", "I64": "<i8", "F16": "<f2", "F32": "<f4",
    "BF16": "<u2", "F8_E4M3": "u1",  # bits: NumPy has no such types
}  # fmt: skip


class StoredPart(NamedTuple):
    """A tensor and the file that it lies in."""

    file: SafetensorsFile
    info: TensorInfo


class Module:
    """The tensors of one module. `parts`: those that were not taken yet, by the last word of their names (weight,
    bias, …)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: dict[str, StoredPart] = {}
        self._all: list[StoredPart] = []

    def add(self, part: str, file: SafetensorsFile, info: TensorInfo) -> None:
        """Adds a tensor. Raises StartupError when there is one of this name already."""
        if part in self.parts:
            raise self.fault(part, f"is also in {self.parts[part].file.path.name}", file.path)
        self.parts[part] = StoredPart(file, info)
        self._all.append(self.parts[part])

    def take(self, part: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> NDArray[Any]:
        """Returns a read-only view of the tensor in one of these shapes (none given: any matrix); BF16 and FP8 as their
        bits.

        types: the names of the types that it may have. Raises StartupError naming a tensor that is missing, of another
        type, empty or misshapen.
        """
        if part not in self.parts:
            raise self.fault(part, "is missing", self._all[0].file.path)
        file, info = self.parts.pop(part)
        if info.encoding.name not in types:
            raise self.fault(part, f"has type {info.encoding.name}, not {' or '.join(types)}", file.path)
        fits = info.shape in shapes if shapes else len(info.shape) == 2
        if not fits or 0 in info.shape:
            expected = " or ".join(str(list(shape)) for shape in shapes) or "that of a matrix"
            raise self.fault(part, f"has shape {list(info.shape)}, not {expected}", file.path)
        return file.raw(info).view(DTYPES[info.encoding.name]).reshape(info.shape)

    def drop(self, *parts: str) -> None:
        """Takes tensors that are not needed, so that they do not count as left over."""
        for part in parts:
            self.parts.pop(part, None)

    def release(self) -> None:
        """Gives the pages of all tensors of the module back to the system."""
        for file, info in self._all:
            file.release(info)

    def fault(self, part: str, what: str, path: Path) -> StartupError:
        """Returns the error for a tensor of the module; `what` says what is wrong with it."""
        return StartupError(f"model {path}: tensor {echo(f'{self.name}.{part}')} {what}; download the model again")


def modules(folder: Path) -> Iterator[Module]:
    """Yields every module that has tensors, in the order of the files. A tensor counts where the folder's index says
    that it is. Raises StartupError naming the file and the fault."""
    by_name: dict[str, Module] = {}
    places = indexed(folder)
    for path in weight_files(folder):
        file = SafetensorsFile(path)
        for info in file.tensors.values():
            if places.get(info.name, path.name) != path.name:
                continue
            name, _, part = info.name.rpartition(".")
            by_name.setdefault(name, Module(name)).add(part, file, info)
    yield from by_name.values()


def to_floats(values: NDArray[Any]) -> NDArray[np.float32]:
    """Converts a tensor that `take` returned for one of FLOATS to float32, as a copy."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
