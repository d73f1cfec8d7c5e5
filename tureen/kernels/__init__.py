"""Native kernels, in C++ under `cpu/`, kernels in Triton under `triton/`, and torch's packed products.

Imports: devices, extras, log; torch, triton.
Imported by: attention, bench, build, grammar_service, layers, lora, models, runner, sampling.
"""
