"""The command `tureen bench`: workloads, drivers of servers and of engines in this process, reports.

Imports: build, config, contract, devices, engine, errors, fetching, files, front, fronts, grammar, http, kernels, log,
media, offline, replicas, run_files, runner, sampling, sandbox, server, serving, temporary_folder, text, weights;
asyncio, jsonschema_rs, msgspec, numpy, torch.
Imported by: nothing.
"""
