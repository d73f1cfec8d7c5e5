"""Adapters: reads peft's folders into factors for the model's matrices, and applies them in the torch model.

Imports: errors, files, kernels, layers, models, registry, weights; numpy, torch.
Imported by: runner.
"""
