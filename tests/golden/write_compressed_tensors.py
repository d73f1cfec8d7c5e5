"""Writes compressed_tensors.safetensors: matrices as compressed-tensors 0.20 stores them, and what it reads back.

To run it: pip install --target DIR compressed-tensors loguru psutil, then PYTHONPATH=DIR.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}
CASES = {
    "group": ("pack-quantized", GROUP),
    "group_asymmetric": ("pack-quantized", GROUP | {"symmetric": False}),
    "channel_packed": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "eight_packed": ("pack-quantized", GROUP | {"num_bits": 8}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8_asymmetric": ("naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8_whole": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8_whole": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8_block": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [8, 32]}),
}
ROWS, COLS = 12, 64


def scales_of(weight, args):
    """Scales and zero points in the shapes that the library's observers give them."""
    rows, cols = {"tensor": (1, 1), "channel": (ROWS, 1), "group": (ROWS, 2), "block": (2, 2)}[args.strategy]
    padded = torch.zeros(16 if args.strategy == "block" else ROWS, COLS)
    padded[:ROWS] = weight
    parts = padded.reshape(rows, padded.shape[0] // rows, cols, COLS // cols)
    low, high = parts.amin((1, 3)).clamp(max=0), parts.amax((1, 3)).clamp(min=0)
    top = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1) - 1
    if args.symmetric:
        scale, zero = torch.maximum(-low, high) / top, None
    else:
        scale = (high - low) / (2 * top + 1)
        zero = (-top - 1 - low / scale).round().to(torch.int8)
    shape = (1,) if args.strategy == "tensor" else (rows, cols)
    return scale.reshape(shape), zero


def main():
    tensors = {}
    torch.manual_seed(0)
    for name, (form, fields) in CASES.items():
        args = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = torch.randn(ROWS, COLS) * torch.linspace(0.5, 2, ROWS)[:, None]
        scale, zero = scales_of(weight, args)
        state = {"weight": weight, "weight_scale": scale.half().float()}
        if zero is not None:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress(stored, scheme)["weight"]
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
        tensors[f"{name}.expected"] = expected.float().contiguous()
    save_file(tensors, Path(__file__).with_name("compressed_tensors.safetensors"))


if __name__ == "__main__":
    main()
