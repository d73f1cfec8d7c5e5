"""This package has a folder for each API that clients use, found by the file `dialect.py` in it. No folder imports
another.

docs/adding-a-dialect.md says how to add one.

Imports: batches, clients, config, contract, errors, fields, files, http, log, media, recordings, requests, sessions,
storage, text; asyncio, msgspec, numpy, starlette.
Imported by: offline.
Independent: folders.
"""
