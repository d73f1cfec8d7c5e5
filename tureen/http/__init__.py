"""HTTP itself: connections, TLS, the gate that every request passes, server-sent events, errors, kept answers.

Imports: config, errors, log, registry, requests, text; asyncio, cryptography, httptools, msgspec, starlette, uvicorn.
Imported by: bench, control, dialects, front, server.
"""
