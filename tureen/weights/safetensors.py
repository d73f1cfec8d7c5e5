"""Reads weights of a Hugging Face folder: one safetensors file, or several with an index. Pickled files are never
opened.

A safetensors file is the length of a header (8 bytes, little-endian), the header (JSON: name -> dtype, shape and range
of bytes), and the tensors' bytes one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.files import read_regular
from tureen.weights.mapped import MAX_SIZE, MappedFile, TensorEncoding, TensorInfo, num_elements, unusable

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_HEADER: Final = 32 << 20  # bytes: some 300,000 tensors
MAX_DIMS: Final = 8
LENGTH: Final = 8
BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class SafetensorsFile(MappedFile):
    """An open safetensors file. Raises StartupError naming the file and the fault. tensors: by name, in file order."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        start, header = self._header()
        infos = [self._info(name, entry, start) for name, entry in header.items() if name != "__metadata__"]
        end = start
        for info in sorted(infos, key=lambda info: (info.offset, info.num_bytes)):
            if info.offset != end:
                raise self._corrupt(f"tensor {echo(info.name)} does not begin at the end of the tensor before it")
            end += info.num_bytes
            self.tensors[info.name] = info
        if end != len(self._map):
            raise self._corrupt(f"its tensors end at byte {end} of a file of {len(self._map)}")

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Returns the offset at which the tensors' bytes begin, and the entry of each tensor."""
        length = int.from_bytes(self._map[:LENGTH], "little")
        start = LENGTH + length
        if start > len(self._map):
            raise self._corrupt(f"a header of {length} bytes in a file of {len(self._map)}")
        if length > MAX_HEADER:
            raise self._corrupt(f"its header has {length} bytes; at most {MAX_HEADER} are read")
        try:
            header = json.loads(self._map[LENGTH:start].decode(), object_pairs_hook=_distinct)
        except (ValueError, RecursionError):
            raise self._corrupt("its header is not valid JSON") from None
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        return start, header

    def _info(self, name: str, entry: Any, start: int) -> TensorInfo:
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (fields.get(key, "") for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or not _are_counts(offsets, 2) or len(offsets) != 2:
            raise self._corrupt(f"the entry of tensor {echo(name)} is damaged")
        if not _are_counts(shape, MAX_DIMS):
            raise self._corrupt(f"tensor {echo(name)} has a shape that is not a list of at most {MAX_DIMS} sizes")
        if dtype not in BITS:
            raise self._corrupt(f"tensor {echo(name)} has the unknown type {echo(dtype)}")
        begin, end = offsets
        if num_elements(shape) * BITS[dtype] != (end - begin) * 8:
            raise self._corrupt(f"tensor {echo(name)}: {end - begin} bytes do not hold {dtype} of shape {shape}")
        return TensorInfo(name, tuple(shape), TensorEncoding(dtype, 1, BITS[dtype] // 8), start + begin, end - begin)

    def _corrupt(self, fault: str) -> StartupError:
        return unusable(self.path, f"corrupt: {fault}")


def header_of(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Returns the beginning of a file of tensors, of each its name, dtype and shape: their bytes follow in that
    order."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % LENGTH)  # tensors begin at a multiple of 8
    return len(encoded).to_bytes(LENGTH, "little") + encoded


def save_float32(tensors: Mapping[str, NDArray[np.float32]], path: Path) -> None:
    """Writes a file of float32 tensors. Raises OSError."""
    with path.open("wb") as file:
        file.write(header_of((name, "F32", values.shape) for name, values in tensors.items()))
        for values in tensors.values():
            file.write(values.astype("<f4").tobytes())


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold the folder's weights. Raises StartupError when there are none or the index is
    damaged."""
    if (folder / INDEX).exists():
        return [folder / name for name in dict.fromkeys(indexed(folder).values())]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(
            f"model {folder}: has no *.safetensors; download the model again, or convert it to safetensors"
        )
    return files


def indexed(folder: Path) -> dict[str, str]:
    """Returns the name of the file of each tensor that the folder's index has; {} without an index. Raises
    StartupError."""
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        files = dict(json.loads(read_regular(index))["weight_map"].items())
        names = list(dict.fromkeys(files.values()))
    except OSError as error:
        raise StartupError(f"model {index}: cannot read it: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StartupError(f"model {index}: corrupt; download the model again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise StartupError(f"model {index}: names a file outside the folder: {echo(name)}")
    return files


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that appears twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key appears twice")
    return entries


def _are_counts(value: Any, most: int) -> bool:
    """Returns whether the value is a list of at most `most` sizes that a file can have."""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(item) is int and 0 <= item <= MAX_SIZE for item in value)
    )
