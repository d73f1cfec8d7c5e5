"""Architectures, one a file: each names the ARCHITECTURES that it serves and reads their config into a ModelConfig.

Imports: attention, contract, devices, errors, kernels, layers, media, weights; msgspec, numpy, torch.
Imported by: lora, runner.
Independent: ARCHITECTURES.
"""
