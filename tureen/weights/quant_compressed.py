"""Checkpoints of compressed-tensors (llm-compressor), in integers of 4 and 8 bits and in 8-bit floats.

A matrix of [outputs, inputs] is stored, by the format of its group in config.json, as
    int-quantized, naive-quantized, float-quantized:  weight [outputs, inputs] in int8 or E4M3
    pack-quantized:  weight_packed  int32 [outputs, ceil(inputs * bits / 32)]: q + 2^(bits - 1), lowest bits first
                     weight_shape   int64 [2]
                     weight_g_idx   int32 [inputs]: the group of each input, where those are not runs
with weight_scale, of the whole, each row, each run of inputs or each block, and in asymmetric ones weight_zero_point:
int8, or packed as above but along the outputs. A value is (q - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import echo
from tureen.weights import quantised
from tureen.weights.modules import FLOATS, Module, to_floats
from tureen.weights.name_patterns import PatternFault, compile_pattern
from tureen.weights.quant_fp8 import fp8_weight
from tureen.weights.quantised import Bytes, Grouped
from tureen.weights.stored import Stored

METHODS = ("compressed-tensors",)
FORMATS: Final = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")
STRATEGIES: Final = {False: ("tensor", "channel", "group"), True: ("tensor", "channel", "group", "block")}  # of floats?
TYPES: Final = ("I8", "F8_E4M3")
PATTERN: Final = "re:"
MAX_PATTERNS: Final = 64
PARTS: Final = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


class Scheme(NamedTuple):
    """How the modules that one of `targets` names are quantised."""

    targets: frozenset[str]  # names of modules, or a class, which all linear modules are of
    patterns: tuple[Callable[[str], bool], ...]  # each says whether a module's name begins with a match
    is_packed: bool
    bits: int  # as stored
    is_float: bool
    is_symmetric: bool
    size: int | None  # inputs that share a scale; None: all
    block: list[int] | None  # floats: rows and inputs that share a scale; None: read from the shape


def reader(settings: Mapping[str, Any]) -> Callable[[Module], Stored | None]:
    """Returns a function that makes a module's weight from its tensors, and None for a module that is not quantised.

    Raises StartupError naming the setting that is not supported, or a tensor that is missing or misshapen.
    """
    sparsity = quantised.table(settings, "sparsity_config")
    if sparsity:
        quantised.setting({"sparsity_config: format": sparsity.get("format")}, "sparsity_config: format", "dense")
    transforms = quantised.table(settings, "transform_config").get("config_groups")
    if transforms:
        raise quantised.unsupported("transform_config", f"{echo(transforms)} is not supported")
    groups = quantised.table(settings, "config_groups")
    if not groups:
        raise quantised.unsupported("config_groups", "names no group")
    tables = [quantised.table(groups, name) for name in groups]
    with_weights = [group for group in tables if quantised.table(group, "weights")]
    num_patterns = sum(target.startswith(PATTERN) for group in with_weights for target in _targets(group))
    if num_patterns > MAX_PATTERNS:
        raise quantised.unsupported("config_groups", f"has {num_patterns} patterns; at most {MAX_PATTERNS} are matched")
    schemes = [_scheme(group, settings) for group in with_weights]
    return lambda module: _weight(module, schemes)


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise quantised.unsupported("config_groups", f"targets must be a list of names, got {echo(targets)}")
    return targets


def _scheme(group: Mapping[str, Any], settings: Mapping[str, Any]) -> Scheme:
    weights, targets = quantised.table(group, "weights"), _targets(group)
    form = quantised.setting({"format": group.get("format") or settings.get("format")}, "format", *FORMATS)
    is_float = quantised.setting(weights, "type", "int", "float", default="int") == "float"
    strategy = quantised.setting(weights, "strategy", *STRATEGIES[is_float], default=_usual_strategy(weights))
    size = quantised.length(weights, "group_size") if strategy == "group" else None
    bits = quantised.setting(weights, "num_bits", *((8,) if is_float else (4, 8)), default=8)
    is_packed = form == "pack-quantized"
    return Scheme(
        frozenset(targets),
        tuple(_compiled(target) for target in targets if target.startswith(PATTERN)),
        is_packed,
        bits if is_packed else 8,
        is_float,
        quantised.setting(weights, "symmetric", *((True,) if is_float else (True, False)), default=True),
        size,
        quantised.block(weights, "block_structure") if strategy == "block" else [1, size] if size else None,
    )


def _usual_strategy(weights: Mapping[str, Any]) -> str:
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _weight(module: Module, schemes: list[Scheme]) -> Stored | None:
    module.drop(*quantised.OF_ACTIVATIONS)
    weight = module.parts.get("weight")
    if not any(part in module.parts for part in PARTS) and (weight is None or weight.info.encoding.name not in TYPES):
        return None
    scheme = _scheme_of(module.name, schemes)
    if scheme.is_float:
        return fp8_weight(module, "weight_scale", scheme.block)
    words, shape = _packed(module, scheme.bits) if scheme.is_packed else _plain(module)
    return _integers(module, scheme, words, shape)


def _scheme_of(name: str, schemes: list[Scheme]) -> Scheme:
    """Returns the scheme of a module. Names come before patterns, and these before classes. Raises StartupError when
    none names it."""
    kind = "Embedding" if name.endswith("embed_tokens") else "Linear"
    named = (scheme for scheme in schemes if name in scheme.targets)
    matched = (scheme for scheme in schemes if any(matches(name) for matches in scheme.patterns))
    of_kind = (scheme for scheme in schemes if kind in scheme.targets)
    for scheme in chain(named, matched, of_kind):
        return scheme
    raise quantised.unsupported("config_groups", f"no group covers {echo(name)}, which is stored quantised")


def _compiled(target: str) -> Callable[[str], bool]:
    try:
        return compile_pattern(f"^(?:{target.removeprefix(PATTERN)})")
    except PatternFault as fault:
        raise quantised.unsupported("config_groups", f"the target {echo(target)} {fault}") from None


def _plain(module: Module) -> tuple[NDArray[Any], tuple[int, int]]:
    weight = module.take("weight", ("I8",))
    return weight.view(np.uint8), (weight.shape[0], weight.shape[1])


def _packed(module: Module, bits: int) -> tuple[NDArray[Any], tuple[int, int]]:
    stored = module.parts.get("weight_packed")
    words = module.take("weight_packed", ("I32",))
    rows, cols = (int(count) for count in module.take("weight_shape", ("I64", "I32"), (2,)))
    if stored is not None and (words.shape != (rows, -(-cols * bits // 32)) or cols < 1):
        raise module.fault("weight_packed", f"is {list(words.shape)} for {rows} rows of {cols}", stored.file.path)
    return words, (rows, cols)


def _integers(module: Module, scheme: Scheme, words: NDArray[Any], shape: tuple[int, int]) -> Stored:
    rows, cols = shape
    bits, zero = scheme.bits, 1 << scheme.bits - 1
    size = min(scheme.size or cols, cols)
    num_groups = -(-cols // size)
    shapes = ((rows, num_groups),) if scheme.size else quantised.whole_or_by_row(rows)
    scales = module.take("weight_scale", FLOATS, *shapes)
    zeros = _zero_points(module, scheme, shapes, (-(-rows * bits // 32), num_groups))
    group_of = quantised.groups_of(module, "weight_g_idx", cols, size, num_groups)

    def integers(begin: int, end: int) -> Bytes:
        if words.dtype == np.uint8:
            return words[begin:end] ^ np.uint8(zero)
        return quantised.unpack(words[begin:end], bits)[:, :cols]

    def read() -> Grouped:
        by_row = np.broadcast_to(to_floats(scales).reshape(-1, num_groups), (rows, num_groups))
        own = np.full((1, 1), zero, np.int16)
        if zeros is not None and zeros.dtype == np.int8:
            own = zeros.astype(np.int16).reshape(-1, num_groups) + np.int16(zero)
        elif zeros is not None:
            own = quantised.unpack(zeros.T, bits)[:, :rows].T.astype(np.int16)
        return Grouped(bits, integers, by_row, own, group_of)

    return quantised.from_groups(module, shape, read)


def _zero_points(
    module: Module, scheme: Scheme, shapes: tuple[tuple[int, ...], ...], packed: tuple[int, int]
) -> NDArray[Any] | None:
    """Returns int8 in one of `shapes`, or words in the shape `packed`; None when the file has none and needs none."""
    stored = module.parts.get("weight_zero_point")
    if stored is None and scheme.is_symmetric:
        return None
    if stored is not None and stored.info.encoding.name == "I32":
        return module.take("weight_zero_point", ("I32",), packed)
    return module.take("weight_zero_point", ("I8",), *shapes)
