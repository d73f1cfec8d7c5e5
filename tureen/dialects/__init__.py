"""The APIs that clients speak, a folder each: how a body is read, how answers and streams are written, its fields.

A folder describes itself and is listed nowhere else; `tureen.registry` finds it.

Imports: contract, errors, http, log, media, requests, text; msgspec, numpy, starlette.
Imported by: offline.
"""
