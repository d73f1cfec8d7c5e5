"""Helper processes: starts, confines, watches and replaces fork servers and their workers.

Imports: config, devices, log.
Imported by: api, build, engine, grammar, media, runner, sampling, serving.
"""
