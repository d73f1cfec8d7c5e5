"""Kernels for CPUs: the loader of the native module and what Python needs to prepare their operands."""
