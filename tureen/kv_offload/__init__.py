"""KV pages outside the KV cache: files of pages, and the threads that carry pages there and back.

Nothing of it is imported by a server without --kv-disk.

Imports: cache, config, contract, engine, errors, files, log; msgspec, numpy.
Imported by: build.
"""
