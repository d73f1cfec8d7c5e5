"""Pieces of which the torch model is made: linear maps, norms, rotary positions, experts.

Imports: attention, kernels; msgspec, numpy, torch.
Imported by: lora, models, runner.
"""
