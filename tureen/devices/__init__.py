"""The device: its memory, control groups, dtypes, number of threads.

Imports: errors; msgspec, torch.
Imported by: api, bench, build, kernels, runner, sandbox.
"""
