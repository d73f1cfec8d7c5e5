"""HTTP as such: connections, TLS, the gate in front of all routes, what a route is, how answers and streams are sent.

Imports: config, errors, log, registry, requests, text; asyncio, cryptography, httptools, msgspec, starlette, uvicorn.
Imported by: bench, control, dialects, front, server.
"""
