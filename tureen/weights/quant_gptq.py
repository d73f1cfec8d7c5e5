"""Checkpoints quantised with GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

A matrix of [outputs, inputs] is stored as, with lowest bits first,
    qweight  int32 [inputs * bits / 32, outputs]: a word holds consecutive inputs of one output
    qzeros   int32 [groups, outputs * bits / 32]: a word holds consecutive outputs; less one in each field, but not in
             the format gptq_v2. The words were made by adding whole words, so that a zero point of 0 borrows from the
             field above.
    scales   [groups, outputs]
    g_idx    int32 [inputs]: the group of each input; in runs, if not quantised in the order of activations
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tureen.errors import echo
from tureen.weights import quantised
from tureen.weights.modules import FLOATS, Module, to_floats
from tureen.weights.quantised import Bytes, Grouped
from tureen.weights.stored import Stored

METHODS = ("gptq",)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
ONE_IN_EACH = {4: 0x11111111, 8: 0x01010101}


def reader(settings: Mapping[str, Any]) -> Callable[[Module], Stored | None]:
    """Returns a function that makes a module's weight from its tensors, and None for a module that is not quantised.

    Raises StartupError naming the setting that is not supported, or a tensor that is missing or misshapen.
    """
    bits = quantised.setting(settings, "bits", 4, 8)
    size = quantised.length(settings, "group_size")
    name = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
    is_v1 = quantised.setting(settings, name, "gptq", "gptq_v2", default="gptq") == "gptq"
    quantised.setting(settings, "pack_dtype", "int32", "torch.int32", default="int32")
    quantised.setting(settings, "is_marlin_format", False, default=False)
    for rule in quantised.table(settings, "dynamic"):
        if not rule.startswith("-:"):  # those name what is not quantised
            raise quantised.unsupported("dynamic", f"the rule {echo(rule)} is not supported; use one scheme for all")
    return lambda module: _weight(module, bits, size, ONE_IN_EACH[bits] if is_v1 else 0)


def _weight(module: Module, bits: int, size: int | None, less: int) -> Stored | None:
    if not any(part in module.parts for part in PARTS):
        return None
    fields = 32 // bits
    words = module.take("qweight", ("I32",))
    rows, cols = words.shape[1], words.shape[0] * fields
    size = min(size or cols, cols)
    num_groups = -(-cols // size)
    zeros = module.take("qzeros", ("I32",), (num_groups, -(-rows // fields)))
    scales = module.take("scales", FLOATS, (num_groups, rows))
    group_of = quantised.groups_of(module, "g_idx", cols, size, num_groups)

    def integers(begin: int, end: int) -> Bytes:
        return quantised.unpack(words[:, begin:end].T, bits)

    def read() -> Grouped:
        own = quantised.unpack(zeros + np.uint32(less), bits)[:, :rows].T.astype(np.int16)
        return Grouped(bits, integers, to_floats(scales).T, own, group_of)

    return quantised.from_groups(module, (rows, cols), read)
