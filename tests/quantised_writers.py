"""Quantised checkpoints, packed by plain loops as the formats are described, and the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from tureen.weights.source import ModelSource

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


class Matrix(NamedTuple):
    """(q - zero) * scale of the input's group; q is unsigned."""

    q: np.ndarray  # int64 [outputs, inputs]
    scales: torch.Tensor  # [outputs, groups], of the type in which they are stored
    zeros: np.ndarray  # int64 [outputs, groups]
    group_of: np.ndarray  # int64 [inputs]
    bits: int

    def values(self):
        """float64 [outputs, inputs], from the definition."""
        scales = self.scales.double().numpy()
        return (self.q - self.zeros[:, self.group_of]) * scales[:, self.group_of]


def rounded(weight, *, size, bits=4, symmetric=True, dtype=torch.float16, order=None):
    """The nearest matrix to float64 [outputs, inputs] in groups of `size`; order: inputs as they are put in groups."""
    rows, cols = weight.shape
    size = size or cols
    group_of = np.empty(cols, np.int64)
    group_of[np.arange(cols) if order is None else order] = np.arange(cols) // size
    num_groups, most = group_of.max() + 1, 2**bits - 1
    scales, zeros = np.zeros((rows, num_groups)), np.full((rows, num_groups), 2 ** (bits - 1))
    for group in range(num_groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = np.maximum(-low, high) * 2 / most if symmetric else (high - low) / most
        if not symmetric:
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 1, most)
    stored = torch.from_numpy(scales).to(dtype)
    exact = stored.double().numpy()[:, group_of]
    q = np.clip(np.round(weight / exact) + zeros[:, group_of], 0, most).astype(np.int64)
    return Matrix(q, stored, zeros, group_of, bits)


def _words(fields, bits):
    """Rows of unsigned integers -> int32 rows of words, lowest bits first; the last word is filled up with zeros."""
    each = 32 // bits
    packed = []
    for row in fields:
        words = [0] * -(-len(row) // each)
        for i, field in enumerate(row):
            words[i // each] |= int(field) << bits * (i % each)
        packed.append(words)
    return np.array(packed, np.int64)


def _int32(words):
    return torch.from_numpy((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32)).contiguous()


def gptq(matrix, *, version=1):
    zeros = _words(matrix.zeros.T, matrix.bits)
    if version == 1:
        zeros -= {4: 0x11111111, 8: 0x01010101}[matrix.bits]
    return {
        "qweight": _int32(_words(matrix.q, matrix.bits).T),
        "qzeros": _int32(zeros),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.from_numpy(matrix.group_of).int(),
    }


def awq(matrix):
    def interleaved(rows):
        """Each row's fields in the order in which they are put into the words."""
        return [[row[i - i % 8 + AWQ_ORDER[i % 8]] for i in range(len(row))] for row in rows]

    return {
        "qweight": _int32(_words(interleaved(matrix.q.T), 4)),
        "qzeros": _int32(_words(interleaved(matrix.zeros.T), 4)),
        "scales": matrix.scales.T.contiguous(),
    }


def packed(matrix, *, symmetric=True):
    """pack-quantized of compressed-tensors."""
    tensors = {
        "weight_packed": _int32(_words(matrix.q, matrix.bits)),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.q.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _int32(_words(matrix.zeros.T, matrix.bits).T)
    return tensors


def int8(matrix):
    """int-quantized of compressed-tensors."""
    return {"weight": torch.from_numpy(matrix.q - 128).to(torch.int8), "weight_scale": matrix.scales}


def fp8(weight, block, *, name, dtype=torch.float32):
    """Tensors in E4M3 with a scale for each block (rows, inputs), and their values: float64, from the definition."""
    rows, cols = weight.shape
    grid = -(-rows // block[0]), -(-cols // block[1])
    scales = torch.empty(grid, dtype=dtype)
    bits = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    values = np.empty((rows, cols))
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(weight[at]).max() / 448
            bits[at] = (torch.from_numpy(weight[at]) / scales[i, j].double()).to(torch.float8_e4m3fn)
            values[at] = bits[at].double().numpy() * float(scales[i, j])
    return {"weight": bits, name: scales}, values


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write(folder: Path, tensors, settings, *, parts=1) -> ModelSource:
    """A folder of these tensors in `parts` files; config.json is made if there is none, and gets the settings."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "quantization_config": settings}))
    names = list(tensors)
    for index in range(parts):
        name = "model.safetensors" if parts == 1 else f"model-{index + 1:05}-of-{parts:05}.safetensors"
        save_file({key: tensors[key] for key in names[index::parts]}, folder / name)
    return ModelSource("m", folder, "safetensors")
