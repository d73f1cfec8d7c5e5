"""The vision encoder of a model: vision towers and projectors, and the arrays that they compute with.

Imports: errors, media; numpy, torch.
Imported by: runner.
"""
