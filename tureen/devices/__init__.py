"""The device: its memory, control groups, dtypes, number of threads; exchange between the ranks of a model.

Imports: errors, extras, log; msgspec, torch.
Imported by: admin, bench, build, data_parallel, kernels, layers, models, multi_model, runner, sandbox, server.
"""
