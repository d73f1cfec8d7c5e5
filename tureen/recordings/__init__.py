"""Recordings of answers: what a client that comes back reads again, and the Responses that a server keeps.

`http` records while it sends.

Imports: clients, config, errors, storage; asyncio, msgspec, starlette.
Imported by: dialects, http, requests.
"""
