"""The command `tureen bench`: workloads, drivers of servers and of engines in this process, reports.

Imports: build, config, contract, devices, engine, errors, files, front, http, kernels, log, runner, sampling, server,
serving, text; asyncio, jsonschema_rs, msgspec, numpy, torch, uvloop.
Imported by: nothing.
"""
