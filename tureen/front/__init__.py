"""This package builds the ASGI application from the descriptions of dialects and control routes. It serves the pages
that are derived from them (`/openapi.json`, `/docs`, `/compat`), and the playground at `/`.

Imports: config, config_facts, contract, control, errors, http, log, media, metrics, requests, serving, text;
asyncio, msgspec, starlette.
Imported by: bench, fleet, fronts.
"""
