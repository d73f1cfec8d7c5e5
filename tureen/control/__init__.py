"""Our own routes beside those that generate: health, facts, metrics, sessions, adapters, weights, profiles, pauses.

Imports: config, contract, devices, errors, http, log, media, requests, text, weights; asyncio, msgspec, starlette.
Imported by: front.
"""
