"""The device: its memory, control groups, dtypes, number of threads.

Imports: errors, extras, log; msgspec, torch.
Imported by: bench, build, control, fleet, kernels, replicas, runner, sandbox.
"""
