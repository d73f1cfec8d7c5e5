"""Helper processes: starts, confines, watches and replaces fork servers and their workers.

Imports: config, devices, log.
Imported by: build, constraining, engine, fleet, media, requests, runner, sampling, serving.
"""
