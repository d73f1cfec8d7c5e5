"""This package keeps clients' files and runs the batches of requests that are in them: what is stored, in which state
a batch is, which of its lines are answered. How to answer a line it is told.

Nothing of it but `records` is imported by a server without --batch-path.

Imports: errors, files, log, storage; asyncio, msgspec.
Imported by: dialects.
"""
