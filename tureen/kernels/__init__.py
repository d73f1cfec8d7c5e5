"""Native kernels, in C++ under `cpu/`, and torch's packed products.

Imports: devices, log; torch.
Imported by: attention, bench, build, grammar, layers, lora, runner, sampling.
"""
