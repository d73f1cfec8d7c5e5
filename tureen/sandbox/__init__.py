"""Child processes: starts all of them; confines, watches and replaces fork servers and their workers.

Imports: config, devices, log.
Imported by: admin, api_workers, bench, build, cli, data_parallel, engine, grammar_service, media, multi_model,
requests, runner, sampling, serving.
"""
