"""Sessions: the tokens that a client's requests continue, as a tree of requests that can branch.

`requests` opens and continues them; `storage` keeps those that are durable.

Imports: config, errors, text; msgspec.
Imported by: admin, dialects, requests.
"""
