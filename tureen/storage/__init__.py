"""This package keeps what clients store here: one SQLite file for each kind of thing, in a thread of its own.

Nothing of it is imported by a server without a setting that names such a file.

Imports: errors, files, log; asyncio, msgspec.
Imported by: batches, clients, dialects, recordings, requests.
"""
