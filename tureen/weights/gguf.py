"""Reads the GGUF container (versions 2 and 3): metadata, tensor table and a memory map of the tensor data. No torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tureen.errors import echo
from tureen.weights.gguf_strings import StringFault, Strings, locate
from tureen.weights.mapped import MAX_SIZE, MappedFile, TensorEncoding, TensorInfo, num_elements, unusable

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_ENTRIES: Final = 1 << 16  # metadata keys, and tensors
MAX_STRINGS: Final = 1 << 21  # of one array; the largest vocabularies have some 500,000 merges
MAX_PARTS: Final = 2 * MAX_STRINGS  # strings and arrays of all arrays
MAX_VALUE_BYTES: Final = 256 << 20  # of one string or array
MAX_METADATA_BYTES: Final = 512 << 20
MAX_NESTING: Final = 4
MAX_DIMS: Final = 4

ENCODINGS: Final = {
    0: TensorEncoding("F32", 1, 4),
    1: TensorEncoding("F16", 1, 2),
    2: TensorEncoding("Q4_0", 32, 18),
    3: TensorEncoding("Q4_1", 32, 20),
    6: TensorEncoding("Q5_0", 32, 22),
    7: TensorEncoding("Q5_1", 32, 24),
    8: TensorEncoding("Q8_0", 32, 34),
    10: TensorEncoding("Q2_K", 256, 84),
    11: TensorEncoding("Q3_K", 256, 110),
    12: TensorEncoding("Q4_K", 256, 144),
    13: TensorEncoding("Q5_K", 256, 176),
    14: TensorEncoding("Q6_K", 256, 210),
    16: TensorEncoding("IQ2_XXS", 256, 66),
    17: TensorEncoding("IQ2_XS", 256, 74),
    18: TensorEncoding("IQ3_XXS", 256, 98),
    19: TensorEncoding("IQ1_S", 256, 50),
    20: TensorEncoding("IQ4_NL", 32, 18),
    21: TensorEncoding("IQ3_S", 256, 110),
    22: TensorEncoding("IQ2_S", 256, 82),
    23: TensorEncoding("IQ4_XS", 256, 136),
    29: TensorEncoding("IQ1_M", 256, 56),
    30: TensorEncoding("BF16", 1, 2),
    34: TensorEncoding("TQ1_0", 256, 54),
    35: TensorEncoding("TQ2_0", 256, 66),
    39: TensorEncoding("MXFP4", 32, 17),
}
UNREADABLE: Final = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

STRING: Final = 8
ARRAY: Final = 9
BOOL: Final = 7
FLOAT32: Final = 6
SCALARS: Final = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", FLOAT32: "<f4", BOOL: "|b1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
DTYPES: Final = {code: np.dtype(name) for code, name in SCALARS.items()}
U32: Final = Struct("<I")
U64: Final = Struct("<Q")


class _Fault(Exception):
    """A fault in the file, told without the file's name."""


class Metadata(Mapping[str, Any]):
    """Every key of a GGUF file, and its value.

    Arrays of numbers are numpy arrays; those of strings become lists each time they are asked for, because they are
    large and needed briefly. Raises StartupError for a string that is not UTF-8.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, Strings):
            return value
        try:
            return value.decode()
        except StringFault as fault:
            raise unusable(self._path, str(fault)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GgufFile(MappedFile):
    """An open GGUF file. Raises StartupError naming the file and the fault; nothing is used before it is checked.

    tensors: by name, in file order; those of a type that cannot be read are left out, and `unreadable` names the first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            header = _Header(self._map)
        except (_Fault, StringFault) as fault:
            raise unusable(path, str(fault)) from None
        self.metadata = Metadata(path, header.metadata)
        self.tensors = header.tensors
        self.unreadable = header.unreadable


class _Header:
    """One pass over the header. Every count and length is checked against what is left of the file first."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._num_parts = 0  # strings and arrays in arrays so far
        num_tensors, num_keys = self._preamble()
        self.metadata = self._metadata(num_keys)
        self.unreadable = ""
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.tensors = self._place([info for info in infos if info is not None])

    def _preamble(self) -> tuple[int, int]:
        if self._data[:4] != MAGIC:
            raise _Fault("not a GGUF file (it does not begin with 'GGUF')")
        self._at = 4
        version = self._u32()
        if version & 0xFFFF == 0 and version:
            raise _Fault("a big-endian GGUF file; only little-endian ones can be read")
        if version not in VERSIONS:
            raise _Fault(f"GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = self._u64(), self._u64()
        for what, count, least in (("tensors", num_tensors, 24), ("metadata keys", num_keys, 13)):
            if count > MAX_ENTRIES or count * least > self._size - self._at:
                raise _Fault(f"the header claims {count} {what}, more than the file can hold")
        return num_tensors, num_keys

    def _metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise _Fault(f"metadata key {echo(key)} appears twice")
            metadata[key] = self._value(self._u32(), MAX_NESTING)
            if self._at > MAX_METADATA_BYTES:
                raise _Fault(f"metadata has more than {MAX_METADATA_BYTES} bytes")
        return metadata

    def _value(self, kind: int, nesting: int) -> object:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(nesting)
        number = self._numbers(kind, 1)[0]
        return float(str(number)) if kind == FLOAT32 else number.item()  # 1e-05, not 9.999999747378752e-06

    def _array(self, nesting: int) -> object:
        if nesting == 0:
            raise _Fault("metadata arrays are nested too deep")
        kind, count = self._u32(), self._u64()
        if kind == STRING:
            return self._strings(count)
        if kind == ARRAY:
            self._require(12, count, "arrays")
            self._count_parts(count)
            parts = [self._array(nesting - 1) for _ in range(count)]
            return [part.decode() if isinstance(part, Strings) else part for part in parts]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise _Fault(f"metadata of unknown type {kind} at byte {self._at}")
        self._require(dtype.itemsize, count, "numbers")
        if count * dtype.itemsize > MAX_VALUE_BYTES:
            raise _Fault(f"metadata has an array of {count} numbers, more than {MAX_VALUE_BYTES} bytes")
        start, self._at = self._at, self._at + count * dtype.itemsize
        stored = np.frombuffer(self._data[start : self._at], np.uint8 if kind == BOOL else dtype)
        return stored != 0 if kind == BOOL else stored

    def _strings(self, count: int) -> Strings:
        self._require(8, count, "strings")
        if count > MAX_STRINGS:
            raise _Fault(f"metadata has an array of {count} strings, at most {MAX_STRINGS} are read")
        self._count_parts(count)
        strings = locate(self._data, self._at, count)
        if strings.end - self._at > MAX_VALUE_BYTES:
            raise _Fault(f"the strings at byte {self._at} have more than {MAX_VALUE_BYTES} bytes")
        self._at = strings.end
        return strings

    def _string(self) -> str:
        return self._strings(1).decode()[0]

    def _tensor_info(self) -> TensorInfo | None:
        """Returns a tensor, not yet placed; None if its type cannot be read."""
        name = self._string()
        num_dims = self._u32()
        if num_dims > MAX_DIMS:
            raise _Fault(f"tensor {echo(name)} has {num_dims} dimensions, at most {MAX_DIMS} are possible")
        shape = tuple(self._u64() for _ in range(num_dims))[::-1]
        code, offset = self._u32(), self._u64()
        encoding = ENCODINGS.get(code)
        if encoding is None:
            known = ", ".join(encoding.name for encoding in ENCODINGS.values())
            self.unreadable = self.unreadable or (
                f"tensor {echo(name)} has type {UNREADABLE.get(code, code)}, which cannot be read (these can: {known})"
            )
            return None
        return TensorInfo(name, shape, encoding, offset, _num_bytes(name, shape, encoding))

    def _place(self, infos: list[TensorInfo]) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _Fault(f"general.alignment must be a power of two up to 1048576, got {echo(alignment)}")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            placed = info._replace(offset=data_start + info.offset)
            if info.offset % alignment:
                raise _Fault(f"tensor {echo(info.name)} is not aligned to {alignment} bytes")
            if placed.offset + placed.num_bytes > self._size:
                raise _Fault(f"truncated: tensor {echo(info.name)} ends at byte {placed.offset + placed.num_bytes} "
                             f"of a file of {self._size}")  # fmt: skip
            if info.name in tensors:
                raise _Fault(f"tensor {echo(info.name)} appears twice")
            tensors[info.name] = placed
        _refuse_overlap(tensors)
        return tensors

    def _count_parts(self, count: int) -> None:
        self._num_parts += count
        if self._num_parts > MAX_PARTS:
            raise _Fault(f"metadata has more than {MAX_PARTS} strings and arrays")

    def _require(self, item_bytes: int, count: int, what: str) -> None:
        if count * item_bytes > self._size - self._at:
            raise _Fault(f"truncated or corrupt: {count} {what} at byte {self._at} of a file of {self._size}")

    def _u32(self) -> int:
        return self._integer(U32)

    def _u64(self) -> int:
        return self._integer(U64)

    def _integer(self, layout: Struct) -> int:
        self._require(layout.size, 1, "numbers")
        value: int = layout.unpack_from(self._data, self._at)[0]
        self._at += layout.size
        return value


def _num_bytes(name: str, shape: tuple[int, ...], encoding: TensorEncoding) -> int:
    count = num_elements(shape)
    if not 0 < count <= MAX_SIZE or (shape or (1,))[-1] % encoding.block_len:
        raise _Fault(f"tensor {echo(name)} has a shape {list(shape)} that {encoding.name} cannot have")
    return count // encoding.block_len * encoding.num_bytes


def _refuse_overlap(tensors: dict[str, TensorInfo]) -> None:
    by_offset: Callable[[TensorInfo], int] = lambda info: info.offset  # noqa: E731 - the key of one sort
    for before, after in pairwise(sorted(tensors.values(), key=by_offset)):
        if before.offset + before.num_bytes > after.offset:
            raise _Fault(f"tensors {echo(before.name)} and {echo(after.name)} overlap")
