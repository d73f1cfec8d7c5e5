"""Kernels in Triton for CUDA devices, one a file, each with its reference in plain torch.

A kernel computes a row in one order of sums, whatever the number of rows. No kernel is tuned while the server runs:
tile sizes are functions of the shape. The references run on any device and are the oracles of the tests.
"""
