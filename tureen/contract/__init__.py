"""The values and interfaces that cross boundaries: requests, outputs, sampling parameters, a step and its runner.

Plain frozen data; no tensors.

Imports: config, errors, grammar; msgspec, regex.
Imported by: all.
"""
