"""This package is the HTTP layer: connections, TLS, access control in front of all routes, the interface of a dialect,
how answers and streams are sent, and traces of requests.

Imports: config, contract, errors, extras, log, registry, requests, struct_warm_up, text; asyncio, cryptography,
httptools, msgspec, opentelemetry, python_multipart, starlette, uvicorn.
Imported by: bench, control, dialects, fleet, front, fronts, replicas, server.
"""
