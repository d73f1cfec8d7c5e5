"""This package is the HTTP layer: connections, TLS, access control in front of all routes, the interface of a dialect,
and how answers and streams are sent.

Imports: config, errors, extras, log, registry, requests, text; asyncio, cryptography, httptools, msgspec,
python_multipart, starlette, uvicorn.
Imported by: bench, control, dialects, fleet, front, server.
"""
