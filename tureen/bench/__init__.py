"""The command `tureen bench`: workloads, drivers of servers and of engines in this process, reports.

Imports: build, config, devices, engine, errors, files, front, http, kernels, log, runner, sampling, server, serving,
text, types; asyncio, jsonschema_rs, msgspec, numpy, torch, uvloop.
Imported by: nothing.
"""
