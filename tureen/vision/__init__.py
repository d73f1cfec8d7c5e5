"""The part of a model that sees, in torch: vision towers and projectors.

Imports: errors, media; torch.
Imported by: runner.
"""
