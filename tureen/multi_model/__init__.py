"""Several models in one server: which are loaded, and which one a request is for. Imported only where there are
several.

Imports: app, build, clients, config, config_facts, devices, errors, fetching, http, log, media, metrics, requests,
runner, sandbox, serving, weights; asyncio, msgspec, starlette.
Imported by: data_parallel.
"""
