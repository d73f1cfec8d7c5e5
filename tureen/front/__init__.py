"""The application: every route of every dialect, `/openapi.json`, `/compat` and the page at `/docs`, all derived.

Imports: config, contract, control, engine, errors, http, log, media, metrics, requests, serving, text; asyncio,
msgspec, starlette.
Imported by: bench.
"""
