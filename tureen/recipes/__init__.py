"""Models that `tureen models build` puts together.

Imports: config, errors, files, log, weights; numpy, safetensors.
Imported by: nothing.
"""
