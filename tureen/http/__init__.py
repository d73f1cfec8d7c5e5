"""This package is the HTTP layer: connections, TLS, access control in front of all routes, the interface of a dialect,
how answers and streams are sent, and traces of requests.

Imports: clients, config, contract, errors, extras, fields, log, recordings, registry, requests, struct_warm_up, text;
asyncio, cryptography, httptools, msgspec, opentelemetry, python_multipart, starlette, uvicorn.
Imported by: admin, api_workers, app, bench, data_parallel, dialects, multi_model, server.
"""
