"""The table of compiled kernels: those of common models, which a test compiles for each kind of GPU without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tureen.kernels.triton import activation, attention, linear, norm, rope_store, sample

FLOAT, DOUBLE, HALF, INT, LONG = "*fp32", "*fp64", "*bf16", "*i32", "*i64"
DIVISIBLE = "i32 % 16"
"""An integer that Triton knows to be a multiple of 16."""


class CompiledKernel(NamedTuple):
    """A kernel with the constants of one shape. Its pointers are aligned to 16 bytes, as torch's are."""

    name: str
    kernel: Any
    arguments: tuple[str, ...]  # types, in their order
    options: dict[str, Any]  # constants, and options of the compiler


SHAPES = {
    "llama-3.1-8b": attention.Shape(32, 8, 128, 0.088),
    "llama-3.2-1b": attention.Shape(32, 8, 64, 0.125),
    "phi-3": attention.Shape(32, 32, 96, 0.1),
    "gemma-2-9b": attention.Shape(16, 8, 256, 0.0625, window=4096, softcap=50.0),
    "gpt-oss-20b": attention.Shape(64, 8, 64, 0.125, window=128),
}
"""The attention of models, by their names."""
WITH_SINKS = ("gpt-oss-20b",)
MATRICES = {"qkv": (6144, 4096), "down": (4096, 14336)}
"""Outputs and inputs of matrices of Llama-3.1-8B."""
VOCABULARIES = (32000, 128256, 262144)
PAGE_SIZE = 16


def variants() -> Iterator[CompiledKernel]:
    """Yields the table."""
    for size in (2048, 4096, 8192):
        for added in (False, True):
            types = (HALF, HALF, FLOAT, HALF, "fp32", "fp32")
            yield CompiledKernel(f"norm {size} {added}", norm._add_norm, types, norm.launch(size, has_added=added))
    for function in activation.FUNCTIONS:
        reads = (HALF, HALF, DIVISIBLE)
        yield CompiledKernel(f"activation {function}", activation._activate_and_mul, reads, activation.launch(function))
    for name, shape in SHAPES.items():
        yield _rope_store(name, shape, has_norms=False)
        yield from _attention(name, shape)
    yield _rope_store("qwen3-8b", SHAPES["llama-3.1-8b"], has_norms=True)
    for name, (outputs, inputs) in MATRICES.items():
        yield from _products(name, outputs, inputs)
    yield CompiledKernel("uniforms", sample._uniforms, (LONG, LONG, DOUBLE, "i32"), {"num_warps": 2})
    for size in VOCABULARIES:
        summing = (FLOAT, FLOAT, DOUBLE, DOUBLE)
        yield CompiledKernel(f"sum_blocks {size}", sample._sum_blocks, summing, sample.launch(size))
        drawing = (*summing, DOUBLE, LONG, DOUBLE)
        yield CompiledKernel(f"choose {size}", sample._choose, drawing, sample.choose_launch(size))


def _rope_store(name: str, shape: attention.Shape, *, has_norms: bool) -> CompiledKernel:
    heads = rope_store.Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    options = rope_store.launch(heads, shape.head_dim, is_interleaved=False, has_norms=has_norms)
    types = (HALF, HALF, HALF, HALF, FLOAT, FLOAT, FLOAT, FLOAT, LONG, "fp32")
    return CompiledKernel(f"rope_store {name}", rope_store._rope_store, types, options)


def _attention(name: str, shape: attention.Shape) -> Iterator[CompiledKernel]:
    has_sinks = name in WITH_SINKS
    sinks, options = FLOAT if has_sinks else HALF, attention.launch(shape, PAGE_SIZE)
    reads = (HALF, HALF, HALF, INT, LONG)
    yield CompiledKernel(f"decode {name}", attention._decode, (*reads, LONG, FLOAT, FLOAT, "i32"), options)
    options = options | {"HAS_SINKS": has_sinks}
    yield CompiledKernel(f"prefill {name}", attention._prefill, (*reads, INT, sinks, HALF, "i32"), options)
    options = attention.merge_launch(shape, has_sinks=has_sinks)
    yield CompiledKernel(f"merge {name}", attention._merge, (FLOAT, FLOAT, LONG, sinks, HALF, "i32"), options)


def _products(name: str, outputs: int, inputs: int) -> Iterator[CompiledKernel]:
    for rows in linear.TOKENS:
        tile = linear.tile_of(outputs, inputs, rows)
        sums = FLOAT if tile.parts > 1 else HALF
        options = linear.launch(tile, outputs, inputs, has_bias=False)
        yield CompiledKernel(f"linear {name} {rows}", linear._multiply, (HALF, HALF, HALF, sums, "i32"), options)
    options = linear.add_launch(tile, outputs, has_bias=False)
    yield CompiledKernel(f"parts {name}", linear._add_parts, (FLOAT, HALF, HALF, "i32"), options)
