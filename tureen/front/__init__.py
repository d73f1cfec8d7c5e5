"""The whole application, put together of what dialects and control say of themselves; `/openapi.json`, `/compat`.

Imports: config, contract, control, engine, errors, http, log, media, metrics, requests, serving, text; asyncio,
msgspec, starlette.
Imported by: bench.
"""
