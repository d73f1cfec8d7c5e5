"""The APIs that clients speak: a folder each, found by the file `dialect.py` in it. No folder imports another.

docs/adding-a-dialect.md says how to add one.

Imports: errors, http, log, media, requests, sampling, text, types; msgspec, numpy, starlette.
Imported by: offline.
"""
