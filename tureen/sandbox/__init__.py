"""Helper processes: starts, confines, watches and replaces fork servers and their workers.

Imports: config, devices, log.
Imported by: build, cli, constraining, engine, fleet, fronts, media, replicas, requests, runner, sampling, serving.
"""
