"""Several models in one server: which are loaded, and which one a request is for. Imported only where there are
several.

Imports: config, devices, errors, http, log, models, requests, runner, serving, weights; asyncio, msgspec, starlette.
Imported by: front, server.
"""
