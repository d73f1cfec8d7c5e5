"""This package builds the ASGI application from the descriptions of dialects and control routes. It serves the pages
that are derived from them (`/openapi.json`, `/docs`, `/compat`), and the playground at `/`.

Imports: admin, config, config_facts, contract, errors, fields, http, log, media, metrics, requests, serving, text;
asyncio, msgspec, starlette.
Imported by: api_workers, bench, multi_model.
"""
