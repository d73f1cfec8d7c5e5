"""Child processes: starts all of them; confines, watches and replaces fork servers and their workers.

Imports: config, devices, log.
Imported by: bench, build, cli, constraining, control, engine, fleet, fronts, media, replicas, requests, runner,
sampling, serving.
"""
