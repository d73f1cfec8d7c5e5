"""Models that `tureen models build` puts together.

Imports: config, errors, fetching, files, log, weights; numpy.
Imported by: nothing.
"""
