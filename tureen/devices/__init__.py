"""The device: its memory, control groups, dtypes, number of threads; exchange between the ranks of a model.

Imports: errors, extras, log; msgspec, torch.
Imported by: bench, build, control, fleet, kernels, layers, models, replicas, runner, sandbox,
server.
"""
