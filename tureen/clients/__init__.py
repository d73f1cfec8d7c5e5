"""The clients of a server: API keys, quotas, shares of the queue, usage.

It reads no body and runs no request.

Imports: config, contract, errors, files, serving, storage; asyncio, msgspec.
Imported by: admin, dialects, http, multi_model, recordings, requests, server.
"""
