"""Makes weights of quantised checkpoints as `Stored`: blocks of GGUF where these keep integers and scales, else
float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.weights.gguf_quants import Q4_0, Q4_1, Q8_0
from tureen.weights.modules import Module, to_floats
from tureen.weights.stored import Stored

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK: Final = 32
LAYOUTS: Final = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0}
ROWS: Final = 64  # converted at once: the temporaries stay in the CPU's cache; a multiple of 8
MOST_LOST: Final = 2.0**-20  # of the sum of squares: what rounding the values themselves to bfloat16 costs
NORMAL: Final = (2.0**-14, 65504.0)  # between these float16 loses at most 2^-11 of a value
OF_ACTIVATIONS: Final = ("input_scale", "input_zero_point", "k_scale", "v_scale")
"""Tensors that say how another runtime rounds activations or its KV cache; here neither is rounded."""


class Grouped(NamedTuple):
    """A matrix [rows, cols] of unsigned integers q, each of which stands for (q - zero) * scale of its group."""

    bits: int  # 4 or 8
    integers: Callable[[int, int], Bytes]  # (begin, end) -> q of these rows, [end - begin, cols]
    scales: Floats  # [rows, groups]
    zeros: NDArray[np.int16]  # [rows, groups], or [1, 1]
    group_of: NDArray[np.int64] | None = None  # [cols]: a column's group; None = runs of equal length


def setting(settings: Mapping[str, Any], key: str, *allowed: Any, default: Any = None) -> Any:
    """Returns the value of `allowed` that `settings[key]` equals; missing and null are the default. Raises
    StartupError."""
    value = settings.get(key)
    value = default if value is None else value
    for choice in allowed:
        if choice == value:
            return choice
    raise unsupported(key, f"{echo(value)} is not supported; known: {', '.join(str(choice) for choice in allowed)}")


def length(settings: Mapping[str, Any], key: str) -> int | None:
    """Returns a group's length; None for -1, null and missing: a whole row. Raises StartupError."""
    value = settings.get(key)
    if value is None or value == -1:
        return None
    if not _is_count(value):
        raise unsupported(key, f"must be a positive integer or -1, got {echo(value)}")
    return int(value)


def table(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns an object of config.json; missing and null are empty. Raises StartupError."""
    value = settings.get(key) or {}
    if not isinstance(value, dict):
        raise unsupported(key, f"must be an object, got {echo(value)}")
    return value


def block(settings: Mapping[str, Any], key: str) -> list[int]:
    """Returns the rows and columns that share a scale. Raises StartupError."""
    value = settings.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(_is_count(number) for number in value):
        raise unsupported(key, f"must be two positive integers, got {echo(value)}")
    return value


def unsupported(key: str, what: str) -> StartupError:
    """Returns the error for a setting of quantization_config; `what` says what is wrong with it."""
    return StartupError(f"config.json: quantization_config: {key}: {what}", field="quantization_config")


def whole_or_by_row(rows: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of one scale for all, and of one for each row."""
    return (), (1,), (1, 1), (rows,), (rows, 1)


def unpack(words: NDArray[np.uint32], bits: int) -> Bytes:
    """Unpacks words [n, k], lowest bits first, into integers [n, k * 32 / bits]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(np.uint8)


def groups_of(module: Module, part: str, cols: int, size: int, num_groups: int) -> NDArray[np.int64] | None:
    """Returns each column's group, [cols], read from the tensor `part` if there is one; None when they are equal runs.

    size: columns of a group. Raises StartupError naming the tensor when it names a group that does not exist.
    """
    usual = np.arange(cols) // size
    groups = usual
    if part in module.parts:
        path = module.parts[part].file.path
        groups = module.take(part, ("I32",), (cols,)).astype(np.int64)
        if groups.max() >= num_groups:
            raise module.fault(part, f"names group {groups.max()} of {num_groups}", path)
    return None if np.array_equal(groups, usual) and cols == num_groups * size else groups


def from_groups(module: Module, shape: tuple[int, int], read: Callable[[], Grouped]) -> Stored:
    """Returns the module's weight of this shape. `read` is called again whenever its bytes are wanted."""
    encoding = _encoding(shape, read)
    return Stored(f"{module.name}.weight", shape, encoding, lambda: _encoded(shape, encoding, read))


def from_fp8(module: Module, weight: Bytes, scales: NDArray[Any], block: tuple[int, int]) -> Stored:
    """Returns the module's weight. weight: bits of E4M3 [rows, cols]; scales: one for each `block` (rows, columns), as
    `Module.take` gives them."""
    rows, cols = weight.shape
    return Stored(f"{module.name}.weight", (rows, cols), "F32", lambda: _fp8(weight, scales, block))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


# Warnings are of no use below: a corrupt scale may be infinite, and the runner notices logits that are not numbers.


@np.errstate(all="ignore")
def _encoding(shape: tuple[int, int], read: Callable[[], Grouped]) -> str:
    matrix = read()
    if matrix.group_of is not None or shape[1] // matrix.scales.shape[1] % BLOCK or not _halves_hold(matrix.scales):
        return "F32"
    if (matrix.zeros == 1 << matrix.bits - 1).all():
        return "Q4_0" if matrix.bits == 4 else "Q8_0"
    return "Q4_1" if matrix.bits == 4 and _halves_hold(matrix.scales * matrix.zeros) else "F32"


def _halves_hold(values: Floats) -> bool:
    """Says whether float16 holds the values: it loses less of them than bfloat16 loses of what they multiply; of
    bfloat16 and float16 scales nothing."""
    sizes = np.abs(values)
    if NORMAL[0] <= sizes.min() and sizes.max() <= NORMAL[1]:
        return True
    exact = values.astype(np.float64)
    lost = values.astype(np.float16) - exact
    return bool(np.vdot(lost, lost) <= MOST_LOST * np.vdot(exact, exact))


@np.errstate(all="ignore")
def _encoded(shape: tuple[int, int], encoding: str, read: Callable[[], Grouped]) -> Bytes:
    matrix = read()
    if encoding == "F32":
        return _dequantised(shape, matrix)
    rows, cols = shape
    blocks = np.empty((rows, cols // BLOCK), LAYOUTS[encoding])
    repeats = blocks.shape[1] // matrix.scales.shape[1]
    scales = matrix.scales.astype(np.float16)
    blocks["d"] = np.repeat(scales, repeats, axis=1)
    if encoding == "Q4_1":
        offsets = -scales.astype(np.float32) * matrix.zeros
        blocks["m"] = np.repeat(offsets.astype(np.float16), repeats, axis=1)
    wholes = blocks["qs"].view(f"V{blocks['qs'].shape[-1]}")[..., 0]  # copied faster than byte by byte
    for begin in range(0, rows, ROWS):
        rest = slice(begin, begin + ROWS)
        q = matrix.integers(begin, min(begin + ROWS, rows)).reshape(-1, *blocks.shape[1:], BLOCK)
        if encoding == "Q8_0":
            wholes[rest] = (q ^ 128).view("V32")[..., 0]
        else:
            wholes[rest] = _nibbles(q)
    return blocks.reshape(-1).view(np.uint8)


def _nibbles(q: Bytes) -> NDArray[np.void]:
    """Packs [..., 32] into [...] of 16 bytes: the first half in the low bits, the second in the high ones. Eight at
    once."""
    eights = q.view(np.uint64)
    packed = np.empty((*eights.shape[:-1], 2), np.uint64)
    for half in range(2):
        np.bitwise_or(eights[..., half], eights[..., 2 + half] << 4, out=packed[..., half])
    return packed.view("V16")[..., 0]


def _dequantised(shape: tuple[int, int], matrix: Grouped) -> Bytes:
    rows, cols = shape
    values = np.empty(shape, np.float32)
    group_of = matrix.group_of
    if group_of is None:
        group_of = np.arange(cols) // (cols // matrix.scales.shape[1])
    scales = np.ascontiguousarray(matrix.scales)
    zeros = np.broadcast_to(matrix.zeros, scales.shape).astype(np.float32)
    for begin in range(0, rows, ROWS):
        rest = slice(begin, begin + ROWS)
        values[rest] = matrix.integers(begin, min(begin + ROWS, rows))
        values[rest] -= zeros[rest][:, group_of]
        values[rest] *= scales[rest][:, group_of]
    return values.reshape(-1).view(np.uint8)


def _e4m3() -> Floats:
    """Returns what the 256 bytes stand for (OCP 8-bit Floating Point Specification): no infinities, S1111111 is NaN."""
    bits = np.arange(256)
    exponents, fractions = bits >> 3 & 15, bits & 7
    values = np.where(exponents, np.ldexp(8.0 + fractions, exponents - 10), np.ldexp(1.0 * fractions, -9))
    values[bits & 127 == 127] = np.nan
    signed: Floats = np.where(bits & 128, -values, values).astype(np.float32)
    return signed


E4M3: Final = _e4m3()


@np.errstate(all="ignore")
def _fp8(weight: Bytes, stored: NDArray[Any], block: tuple[int, int]) -> Bytes:
    rows, cols = weight.shape
    scales = to_floats(stored)
    values = np.empty(weight.shape, np.float32)
    for begin in range(0, rows, ROWS):
        rest = slice(begin, begin + ROWS)
        np.take(E4M3, weight[rest], out=values[rest], mode="clip")  # clip: not looked for, all 256 are there
        own = scales[np.arange(begin, min(begin + ROWS, rows)) // block[0]]
        values[rest] *= np.repeat(own, min(block[1], cols), axis=1)[:, :cols]
    return values.reshape(-1).view(np.uint8)
