"""Attention of the torch model over paged keys and values; one backend a file.

Imports: errors, kernels, registry; numpy, torch.
Imported by: build, layers, models, runner.
"""
