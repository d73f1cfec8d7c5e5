"""Pieces of which the torch model is made: linear maps, norms, rotary positions, experts.

Imports: attention, devices, kernels; msgspec, numpy, torch.
Imported by: lora, models, runner.
"""
