"""Converts block formats of GGUF tensors to float32, bit for bit as ggml computes them. NumPy only.

A block holds 32 or 256 consecutive values: small integers `q`, a float16 scale `d` and, in some formats, an offset `m`.
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
}
