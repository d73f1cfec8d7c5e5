"""Attention of the torch model over paged keys and values; one backend a file.

Imports: kernels; numpy, torch.
Imported by: layers, models, runner.
"""
