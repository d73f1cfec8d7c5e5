"""Rewrites GGUF types without kernels in a wider block format, without loss. Their grids come from the `gguf` package.

A value of these types is d * scale / 8 * v: d a float16 for 256 values, scale a small odd integer for 16 of them.
v is one of at most 16 integers, so 4 bits hold it. NumPy only, and `gguf` if one of the types occurs.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen import extras
from tureen.weights.gguf_quants import WIDE_IQ, WIDE_MAGNITUDES
from tureen.weights.mapped import TensorEncoding, TensorInfo

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
STEP: Final = 4096  # blocks rewritten together: the temporaries stay small
SIGN: Final = 8  # of a code: the sign; the rest is the index of the magnitude
BYTES: Final = np.arange(256, dtype=np.uint8)
EIGHT_SIGNS: Final = (np.unpackbits(BYTES[:, None], axis=1, bitorder="little") * np.uint8(SIGN)).view("<u8")[:, 0]
"""[256]: for a byte of signs, eight codes."""
SEVEN_BITS: Final = np.uint32(127)


class Unpacked(NamedTuple):
    """Blocks of 256 values, taken apart."""

    d: NDArray[np.float16]  # [n]
    scales: NDArray[Any]  # [n, 16]
    codes: Words  # [n, 32]: eight codes each


def _grid(name: str, magnitudes: str, offset: int = 0, factor: int = 1) -> Bytes:
    """Returns the codes of the grid's rows, [rows, 8 or 4], for grid * factor + offset."""
    traits = getattr(importlib.import_module("gguf.quants"), name)
    traits.init_grid()
    return _codes(traits.grid[0, 0].astype(np.int64) * factor + offset, magnitudes)


def _codes(values: NDArray[np.int64], magnitudes: str) -> Bytes:
    codes = np.searchsorted(WIDE_MAGNITUDES[magnitudes], np.abs(values)) + SIGN * (values < 0)
    return codes.astype(np.uint8)


@cache
def _eights(name: str, magnitudes: str, factor: int = 1) -> Words:
    """Returns the grid's rows as words of eight codes, [rows]."""
    words: Words = _grid(name, magnitudes, factor=factor).view("<u8")[:, 0]
    return words


@cache
def _fours(name: str, factor: int) -> NDArray[np.uint32]:
    words: NDArray[np.uint32] = _grid(name, f"WIDE_{name}", factor=factor).view("<u4")[:, 0]
    return words


@cache
def _shifted() -> Words:
    """Returns the grid of IQ1 with 1/8 added and with 1/8 taken off, [2, 2048]."""
    grids = [_grid("IQ1_S", "WIDE_IQ2", offset, 8).view("<u8")[:, 0] for offset in (1, -1)]
    return np.stack(grids)


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def _numbers(blocks: Bytes, begin: int, end: int, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype)


def _by_nibbles(packed: Bytes) -> Bytes:
    """[n, k] -> [n, 2k]: the low half of each byte, then its high half."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _signs(indices: NDArray[Any]) -> Words:
    """Returns words of signs for indices of 7 bits: the eighth sign makes the number of minuses even."""
    low = BYTES[:128]
    parity = np.unpackbits(low[:, None], axis=1).sum(axis=1) % 2
    words: Words = EIGHT_SIGNS[low | (parity << 7).astype(np.uint8)][indices]
    return words


def _four_indices(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """[n, 8] words -> [n, 32]: four indices of 7 bits in each, the lowest first."""
    shifts = np.array([0, 7, 14, 21], np.uint32)
    indices: NDArray[np.uint32] = (words[:, :, None] >> shifts & SEVEN_BITS).reshape(len(words), -1)
    return indices


def _odd(scales: NDArray[Any], repeats: int = 1) -> NDArray[Any]:
    return np.repeat(2 * scales.astype(np.int8) + np.int8(1), repeats, axis=1)


def _iq2_xxs(blocks: Bytes) -> Unpacked:
    words = _numbers(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    rows = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    codes = _eights("IQ2_XXS", "WIDE_IQ2")[rows] | _signs(_four_indices(words[:, :, 1]))
    return Unpacked(_half(blocks, 0), _odd(words[:, :, 1] >> 28, 2), codes)


def _iq2_xs(blocks: Bytes) -> Unpacked:
    words = _numbers(blocks, 2, 66, "<u2")
    codes = _eights("IQ2_XS", "WIDE_IQ2")[words & 511] | _signs(words >> 9)
    return Unpacked(_half(blocks, 0), _odd(_by_nibbles(blocks[:, 66:74])), codes)


def _iq2_s(blocks: Bytes) -> Unpacked:
    low, signs, scales = blocks[:, 2:34], blocks[:, 34:66], _by_nibbles(blocks[:, 74:82])
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 32)
    codes = _eights("IQ2_S", "WIDE_IQ2")[low | high.astype(np.uint16) << 8] | EIGHT_SIGNS[signs]
    return Unpacked(_half(blocks, 0), _odd(scales), codes)


def _iq3_xxs(blocks: Bytes) -> Unpacked:
    words = _numbers(blocks, 66, 98, "<u4")
    codes = _fours("IQ3_XXS", 2)[blocks[:, 2:66]].view("<u8") | _signs(_four_indices(words))
    return Unpacked(_half(blocks, 0), _odd(words >> 28, 2), codes)


def _iq3_s(blocks: Bytes) -> Unpacked:
    low, signs, scales = blocks[:, 2:66], blocks[:, 74:106], _by_nibbles(blocks[:, 106:110])
    high = np.unpackbits(np.ascontiguousarray(blocks[:, 66:74]), axis=1, bitorder="little")
    codes = _fours("IQ3_S", 8)[low | high.astype(np.uint16) << 8].view("<u8") | EIGHT_SIGNS[signs]
    return Unpacked(_half(blocks, 0), _odd(scales, 2), codes)


def _iq1_s(blocks: Bytes) -> Unpacked:
    high = _numbers(blocks, 34, 50, "<u2")
    top = (high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    codes = _shifted()[np.repeat(high >> 15, 4, axis=1), blocks[:, 2:34] | top << 8]
    return Unpacked(_half(blocks, 0), _odd(high >> 12 & 7, 2), codes)


def _iq1_m(blocks: Bytes) -> Unpacked:
    words = _numbers(blocks, 48, 56, "<u2")  # d in the high four bits of each
    d = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16).view(np.float16)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    high = _by_nibbles(blocks[:, 32:48]).astype(np.uint16)
    return Unpacked(d, _odd(scales), _shifted()[high >> 3, blocks[:, :32] | (high & 7) << 8])


def _ternary(d: NDArray[np.float16], q: NDArray[Any]) -> Unpacked:
    """q: [n, 256], 0 to 2 for -1 to 1; a damaged file may have 3, which is 2."""
    codes = _codes(np.array([-8, 0, 8, 16]), "WIDE_IQ2")[q]
    return Unpacked(d, np.ones((len(d), 16), np.int8), np.ascontiguousarray(codes).view("<u8"))


def _tq1_0(blocks: Bytes) -> Unpacked:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4]]
    q = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1).astype(np.uint16) * 3 >> 8
    return _ternary(_half(blocks, 52), q)


def _tq2_0(blocks: Bytes) -> Unpacked:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return _ternary(_half(blocks, 64), (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(len(blocks), -1))


WIDENED: Final[dict[str, tuple[str, Callable[[Bytes], Unpacked]]]] = {
    "IQ1_S": ("WIDE_IQ2", _iq1_s),
    "IQ1_M": ("WIDE_IQ2", _iq1_m),
    "IQ2_XXS": ("WIDE_IQ2", _iq2_xxs),
    "IQ2_XS": ("WIDE_IQ2", _iq2_xs),
    "IQ2_S": ("WIDE_IQ2", _iq2_s),
    "IQ3_XXS": ("WIDE_IQ3_XXS", _iq3_xxs),
    "IQ3_S": ("WIDE_IQ3_S", _iq3_s),
    "TQ1_0": ("WIDE_IQ2", _tq1_0),
    "TQ2_0": ("WIDE_IQ2", _tq2_0),
}
"""The type in the file -> the encoding it is rewritten in, and how its blocks are taken apart."""


ENCODINGS: Final = {name: TensorEncoding(name, 256, WIDE_IQ.itemsize) for name in WIDE_MAGNITUDES}


def require_tables(name: str) -> None:
    """Raises StartupError if the tables of this type are not installed."""
    if name.startswith("IQ"):
        extras.require(f"a GGUF file with tensors of type {name}", "gguf", field="model_path")


def note(tensors: Iterable[TensorInfo]) -> str:
    """Returns a sentence about the tensors that are rewritten, empty if there are none."""
    counts = Counter(tensor.encoding.name for tensor in tensors if tensor.encoding.name in WIDENED)
    types = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    return types and f"tensors of these types use 4.56 bits per weight in memory, without loss: {types}"


def widen(name: str, raw: Bytes, num_bytes: int) -> Bytes:
    """Rewrites blocks of a type of WIDENED in its wider encoding. num_bytes: of a stored block."""
    stored = raw.reshape(-1, num_bytes)
    blocks = np.empty(len(stored), WIDE_IQ)
    for begin in range(0, len(stored), STEP):
        rest = slice(begin, begin + STEP)
        parts = WIDENED[name][1](stored[rest])
        blocks["d"][rest] = parts.d
        blocks["scales"][rest] = parts.scales
        words = parts.codes.reshape(-1, 8, 2, 2)
        blocks["qs"][rest] = (words[:, :, 0] | words[:, :, 1] << np.uint64(4)).view(np.uint8).reshape(-1, 8, 16)
    return blocks.view(np.uint8)
