"""Native kernels, in C++ under `cpu/`, and torch's packed products.

Imports: devices, log; torch.
Imported by: attention, bench, build, constraining, layers, lora, runner, sampling.
"""
