"""The command `tureen bench`: workloads, drivers of servers and of engines in this process, reports.

Imports: api_workers, app, build, config, contract, data_parallel, devices, engine, errors, fetching, files, grammar,
http, kernels, log, media, offline, run_files, runner, sampling, sandbox, server, serving, temporary_folder, text,
weights; asyncio, jsonschema_rs, msgspec, numpy, torch.
Imported by: nothing.
"""
