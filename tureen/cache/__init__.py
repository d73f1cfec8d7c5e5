"""Page accounting in integers: the pool of pages, the radix tree of cached prefixes, the manager of both.

Imports: nothing.
Imported by: engine, kv_offload.
"""
