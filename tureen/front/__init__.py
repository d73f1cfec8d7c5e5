"""This package builds the ASGI application from the descriptions of dialects and control routes, and serves what is
derived from them: `/openapi.json`, `/docs`, `/compat`. It serves the playground at `/`, too.

Imports: config, config_facts, contract, control, errors, http, log, media, metrics, requests, serving, text;
asyncio, msgspec, starlette.
Imported by: bench, fleet, fronts.
"""
