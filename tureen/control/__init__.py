"""Our own routes beside those that generate: health, facts, metrics, sessions, adapters, weights, profiles, pauses.

Imports: config, devices, errors, http, log, media, requests, sampling, text, types, weights; asyncio, msgspec,
starlette.
Imported by: front.
"""
