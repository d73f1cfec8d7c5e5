"""Routes for operators: health, metrics, pauses, weights, adapters, profiles, sessions, parsing.

They belong to no API dialect.

Imports: config, devices, errors, http, log, media, requests, sampling, text, types, weights; asyncio, msgspec,
starlette.
Imported by: front.
"""
