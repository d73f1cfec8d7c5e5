"""Normalises and rotates queries and keys, and stores keys and values in their pages: one program a token and head.

The three steps are those of `layers/norm.py`, `layers/rotary.py` and `index_copy_`, and round where these round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Heads(NamedTuple):
    """The heads in a row of queries, keys and values, in this order."""

    queries: int
    keys: int  # and values
    size: int


class Rope(NamedTuple):
    """The rotation of each token: cos and signed sin, float32 [tokens, rotated dimensions], contiguous."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool


class HeadNorms(NamedTuple):
    """Weights of the norms of queries and keys, float32 [head size]."""

    queries: Tensor
    keys: Tensor
    eps: float


def rope_store(
    qkv: Tensor,
    heads: Heads,
    rope: Rope,
    norms: HeadNorms | None,
    slots: Tensor,
    pages: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns the queries [tokens, heads, size], and stores the keys and values of each token.

    qkv [tokens, (queries + 2 * keys) * size], contiguous. slots: int64 [tokens]; a token with a negative slot is not
    stored. pages: of keys and of values, each [pages, page size, heads, size], contiguous.
    """
    tokens = qkv.shape[0]
    queries = torch.empty(tokens, heads.queries, heads.size, dtype=qkv.dtype, device=qkv.device)
    weights = norms or HeadNorms(rope.cos, rope.cos, 0.0)
    if tokens:
        _rope_store[(tokens, heads.queries + 2 * heads.keys)](
            qkv,
            queries,
            pages[0],
            pages[1],
            rope.cos,
            rope.sin,
            weights.queries,
            weights.keys,
            slots,
            weights.eps,
            **launch(heads, rope.cos.shape[1], is_interleaved=rope.is_interleaved, has_norms=norms is not None),
        )
    return queries


def reference(
    qkv: Tensor,
    heads: Heads,
    rope: Rope,
    norms: HeadNorms | None,
    slots: Tensor,
    pages: tuple[Tensor, Tensor],
) -> Tensor:
    """Computes `rope_store` in plain torch."""
    split = qkv.view(qkv.shape[0], -1, heads.size).split([heads.queries, heads.keys, heads.keys], dim=1)
    placed = []
    for vectors, weight in zip(split[:2], norms[:2] if norms else (None, None), strict=True):
        if weight is not None and norms is not None:
            wide = vectors.float()
            inverse = wide.square().mean(dim=-1, keepdim=True).add_(norms.eps).rsqrt_()
            vectors = wide.mul(inverse).mul_(weight).to(qkv.dtype)
        placed.append(_rotated(vectors, rope))
    stored = slots >= 0
    for own, new in zip(pages, (placed[1], split[2]), strict=True):
        own.flatten(0, 1)[slots[stored]] = new[stored]
    return placed[0].contiguous()


def _rotated(vectors: Tensor, rope: Rope) -> Tensor:
    size = rope.cos.shape[1]
    wide = vectors[..., :size].float()
    if rope.is_interleaved:
        wide = torch.cat((wide[..., ::2], wide[..., 1::2]), dim=-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    turned = (wide.roll(size // 2, dims=-1) * sin + wide * cos).to(vectors.dtype)
    return torch.cat((turned, vectors[..., size:]), dim=-1)


def launch(heads: Heads, rotated: int, *, is_interleaved: bool, has_norms: bool) -> dict[str, Any]:
    """Returns the constants and options with which the kernel is compiled for these heads."""
    return {
        "QUERIES": heads.queries,
        "KEYS": heads.keys,
        "SIZE": heads.size,
        "ROTATED": rotated,
        "IS_INTERLEAVED": is_interleaved,
        "HAS_NORMS": has_norms,
        "BLOCK": triton.next_power_of_2(heads.size),
        "num_warps": 1,
    }


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_store(
    qkv,
    queries,
    key_pages,
    value_pages,
    cos,
    sin,
    query_weight,
    key_weight,
    slots,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    inside = dims < SIZE
    source = qkv + (token * (QUERIES + 2 * KEYS) + head) * SIZE
    slot = tl.load(slots + token)
    if head >= QUERIES + KEYS:
        place = value_pages + (slot * KEYS + head - QUERIES - KEYS) * SIZE
        tl.store(place + dims, tl.load(source + dims, inside, 0.0), inside & (slot >= 0))
    else:
        own, other = _places(dims, ROTATED, IS_INTERLEAVED)
        value, partner = tl.load(source + own, inside, 0.0), tl.load(source + other, inside, 0.0)
        if HAS_NORMS:
            weight = query_weight
            if head >= QUERIES:
                weight = key_weight
            wide = value.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
            value = (wide * inverse * tl.load(weight + own, inside, 0.0)).to(value.dtype)
            factor = tl.load(weight + other, inside, 0.0)
            partner = (partner.to(tl.float32) * inverse * factor).to(value.dtype)
        turn = token * ROTATED + dims
        cosine, sine = tl.load(cos + turn, dims < ROTATED, 1.0), tl.load(sin + turn, dims < ROTATED, 0.0)
        result = (partner.to(tl.float32) * sine + value.to(tl.float32) * cosine).to(value.dtype)
        if head < QUERIES:
            tl.store(queries + (token * QUERIES + head) * SIZE + dims, result, inside)
        else:
            tl.store(key_pages + (slot * KEYS + head - QUERIES) * SIZE + dims, result, inside & (slot >= 0))


@triton.jit
def _places(dims, ROTATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Returns the places of each number of the result, and of its partner in the pair, before the rotation."""
    is_first = dims < ROTATED // 2
    if IS_INTERLEAVED:
        own = tl.where(is_first, 2 * dims, 2 * dims - ROTATED + 1)
        other = tl.where(is_first, 2 * dims + 1, 2 * dims - ROTATED)
    else:
        own = dims
        other = tl.where(is_first, dims + ROTATED // 2, dims - ROTATED // 2)
    return tl.where(dims < ROTATED, own, dims), tl.where(dims < ROTATED, other, dims)
