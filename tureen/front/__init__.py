"""The application: every route of every dialect, `/openapi.json`, `/compat` and the page at `/docs`, all derived.

Imports: config, control, engine, errors, http, log, media, metrics, requests, sampling, serving, text; asyncio,
msgspec, starlette.
Imported by: bench.
"""
