"""What a server knows of its clients: their API keys, their quotas, their shares of the queue, and what they used.

It reads no body and runs no request.

Imports: config, contract, errors, files, serving, storage; asyncio, msgspec.
Imported by: admin, dialects, http, multi_model, recordings, requests, server.
"""
