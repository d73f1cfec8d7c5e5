"""Several models in one server: which are loaded, and which one a request is for. Imported only where there are
several.

Imports: build, config, config_facts, devices, errors, fetching, front, http, log, media, metrics, requests, runner,
sandbox, serving, weights; asyncio, msgspec, starlette.
Imported by: replicas.
"""
