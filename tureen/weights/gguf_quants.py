"""Converts block formats of GGUF tensors to float32, bit for bit as ggml computes them. NumPy only.

A block holds 32 or 256 consecutive values: small integers `q`, a float16 scale `d` and, in some formats, an offset `m`.
In MXFP4 and IQ4, the integers are indices of a table; the scale of MXFP4 is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.weights.mapped import TensorEncoding

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Records = NDArray[np.void]
CHUNK_VALUES: Final = 1 << 16  # converted at once: the temporaries stay in the CPU's cache

HALF: Final = ("d", "<f2")
Q4_0: Final = np.dtype([HALF, ("qs", "u1", 16)])
Q4_1: Final = np.dtype([HALF, ("m", "<f2"), ("qs", "u1", 16)])
Q5_0: Final = np.dtype([HALF, ("qh", "u1", 4), ("qs", "u1", 16)])
Q5_1: Final = np.dtype([HALF, ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q8_0: Final = np.dtype([HALF, ("qs", "i1", 32)])
Q4_K: Final = np.dtype([HALF, ("m", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))])
Q5_K: Final = np.dtype([HALF, ("m", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", (4, 32))])
Q6_K: Final = np.dtype([("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), HALF])
Q3_K: Final = np.dtype([("qh", "u1", 32), ("ql", "u1", (2, 1, 32)), ("scales", "u1", 12), HALF])
Q2_K: Final = np.dtype([("scales", "u1", 16), ("qs", "u1", (2, 1, 32)), HALF, ("m", "<f2")])
MXFP4: Final = np.dtype([("e", "u1"), ("qs", "u1", 16)])
IQ4_XS: Final = np.dtype([HALF, ("scales_high", "<u2"), ("scales_low", "u1", 4), ("qs", "u1", (8, 16))])
MXFP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of E2M1, OCP Microscaling Formats 1.0."""
IQ4_VALUES: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
WIDE_IQ: Final = np.dtype([HALF, ("scales", "i1", 16), ("qs", "u1", (8, 16))])
"""Blocks that gguf_widen.py makes."""
WIDE_MAGNITUDES: Final = {
    "WIDE_IQ2": np.array([0, 1, 7, 8, 9, 16, 25, 43]),
    "WIDE_IQ3_XXS": np.array([8, 24, 40, 56, 72, 88, 104, 124]),
    "WIDE_IQ3_S": np.arange(8, 121, 16),
}
"""Eight times the sizes of values, by the low three bits of their codes; the fourth bit is the sign."""
TWO_BITS: Final = np.array([0, 2, 4, 6], np.uint8)[:, None]


def dequantize(raw: Bytes, encoding: TensorEncoding, out: Floats) -> None:
    """Writes the values stored in `raw` to the flat array `out`. Raises StartupError for an unknown encoding."""
    convert = CONVERTERS.get(encoding.name)
    if convert is None:
        raise StartupError(f"tensors of type {echo(encoding.name)} cannot be read; these can: {', '.join(CONVERTERS)}")
    num_blocks = out.size // encoding.block_len
    if out.size % encoding.block_len or raw.size != num_blocks * encoding.num_bytes:
        raise StartupError(f"{raw.size} bytes of {encoding.name} do not hold {out.size} values")
    stored = raw.reshape(num_blocks, encoding.num_bytes)
    values = out.reshape(num_blocks, encoding.block_len)
    step = CHUNK_VALUES // encoding.block_len
    with np.errstate(all="ignore"):  # a corrupt scale may be infinite; the runner notices logits that are not numbers
        for start in range(0, num_blocks, step):
            convert(stored[start : start + step], values[start : start + step])


def _as(blocks: Bytes, layout: np.dtype[np.void]) -> Records:
    """Views [n, bytes] as [n] records of this layout, not copied."""
    records: Records = blocks.view(layout)[:, 0]
    return records


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Unpacks [..., k] to [..., 2k]: low halves of the bytes are the first half of the values, high halves the
    second."""
    half = packed.shape[-1]
    out[..., :half] = packed & 15
    out[..., half:] = packed >> 4


def _column(numbers: NDArray[Any]) -> Floats:
    return numbers.astype(np.float32)[:, None]


def _q4_0(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q4_0)
    _nibbles(block["qs"], out)
    out -= 8
    out *= _column(block["d"])


def _q4_1(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q4_1)
    _nibbles(block["qs"], out)
    out *= _column(block["d"])
    out += _column(block["m"])


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpacks [n, 4] to [n, 32]: bit i of the little-endian word, as 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q5_0)
    _nibbles(block["qs"], out)
    out += _fifth_bits(block["qh"])
    out -= 16
    out *= _column(block["d"])


def _q5_1(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q5_1)
    _nibbles(block["qs"], out)
    out += _fifth_bits(block["qh"])
    out *= _column(block["d"])
    out += _column(block["m"])


def _q8_0(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q8_0)
    np.multiply(block["qs"], _column(block["d"]), out=out)


def _sub_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpacks 12 bytes to 8 scales and 8 offsets of 6 bits each: [n, 12] -> two of [n, 8]."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    offsets = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return scales, offsets


def _scale_and_shift(block: Records, values: Floats) -> None:
    """Computes values * d * scale - m * offset in place; values [n, 8, 32]."""
    scales, offsets = _sub_scales(block["scales"])
    values *= (_column(block["d"]) * scales)[:, :, None]
    values -= (_column(block["m"]) * offsets)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q4_K)
    _nibbles(block["qs"], out.reshape(-1, 4, 64))
    _scale_and_shift(block, out.reshape(-1, 8, 32))


def _q5_k(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q5_K)
    _nibbles(block["qs"], out.reshape(-1, 4, 64))
    values = out.reshape(-1, 8, 32)
    for sub_block in range(8):
        values[:, sub_block] += (block["qh"] >> sub_block & 1) << 4
    _scale_and_shift(block, values)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q6_K)
    values = out.reshape(-1, 2, 4, 32)
    low, high = block["ql"], block["qh"]
    for quarter in range(4):
        nibble = low[:, :, quarter % 2] >> 4 * (quarter // 2) & 15
        values[:, :, quarter] = nibble | (high >> 2 * quarter & 3) << 4
    out -= 32
    out.reshape(-1, 16, 16)[...] *= (_column(block["d"]) * block["scales"])[:, :, None]


def _two_bits(packed: Bytes, out: Floats) -> None:
    """Unpacks [n, 2, 1, 32] to [n, 256]: 128 values share 32 bytes."""
    out.reshape(-1, 2, 4, 32)[...] = packed >> TWO_BITS & 3


def _q3_k(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q3_K)
    _two_bits(block["ql"], out)
    values = out.reshape(-1, 8, 32)
    for sub_block in range(8):
        values[:, sub_block] += (block["qh"] >> sub_block & 1) << 2
    out -= 4
    low, high = block["scales"][:, :8], block["scales"][:, None, 8:]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    scales = (nibbles | ((high >> TWO_BITS & 3) << 4).reshape(-1, 16)).astype(np.int8) - np.int8(32)
    out.reshape(-1, 16, 16)[...] *= (_column(block["d"]) * scales)[:, :, None]


def _q2_k(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q2_K)
    _two_bits(block["qs"], out)
    values = out.reshape(-1, 16, 16)
    values *= (_column(block["d"]) * (block["scales"] & 15))[:, :, None]
    values -= (_column(block["m"]) * (block["scales"] >> 4))[:, :, None]


def _look_up(table: Floats, packed: Bytes, out: Floats) -> None:
    """Writes the entries of a table of 16; the order of the nibbles is that of `_nibbles`."""
    half = packed.shape[-1]
    out[..., :half] = table[packed & 15]
    out[..., half:] = table[packed >> 4]


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, MXFP4)
    _look_up(MXFP4_VALUES, block["qs"], out)
    out *= np.ldexp(np.float32(1), block["e"].astype(np.int32) - 128)[:, None]


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, Q4_0)
    _look_up(IQ4_VALUES, block["qs"], out)
    out *= _column(block["d"])


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    block = _as(blocks, IQ4_XS)
    values = out.reshape(-1, 8, 32)
    _look_up(IQ4_VALUES, block["qs"], values)
    low = (block["scales_low"][:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = block["scales_high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    values *= (_column(block["d"]) * scales)[:, :, None]


def _wide(name: str) -> Callable[[Bytes, Floats], None]:
    magnitudes = WIDE_MAGNITUDES[name].astype(np.float32)
    table = np.concatenate([magnitudes, np.float32(0) - magnitudes])

    def convert(blocks: Bytes, out: Floats) -> None:
        block = _as(blocks, WIDE_IQ)
        _look_up(table, block["qs"], out.reshape(-1, 8, 32))
        out.reshape(-1, 16, 16)[...] *= (_column(block["d"]) * block["scales"] * np.float32(0.125))[:, :, None]

    return convert


CONVERTERS: Final[dict[str, Callable[[Bytes, Floats], None]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    **{name: _wide(name) for name in WIDE_MAGNITUDES},
}
