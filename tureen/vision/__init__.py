"""The part of a model that sees: vision towers and projectors, and the arrays that they compute with.

Imports: errors, media; numpy, torch.
Imported by: runner.
"""
