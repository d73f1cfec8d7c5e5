"""Routes for operators: health, metrics, pauses, weights, adapters, profiles, sessions, parsing.

They belong to no API dialect.

Imports: config, contract, devices, errors, http, log, media, requests, text, weights; asyncio, msgspec, starlette.
Imported by: front.
"""
