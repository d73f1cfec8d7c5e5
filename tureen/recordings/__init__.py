"""Recordings of answers. Clients that reconnect continue from them, and stored Responses are read from them.

`http` records while it sends.

Imports: clients, config, errors, storage; asyncio, msgspec, starlette.
Imported by: dialects, http, requests.
"""
