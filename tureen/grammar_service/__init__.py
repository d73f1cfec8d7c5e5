"""Constraints of running outputs: compile workers, the cache of compiled grammars, masks beside the forward pass.

It gives `grammar` its processes and threads, and checks finished outputs a second time.

Imports: errors, files, grammar, kernels, log, sandbox; asyncio, jsonschema_rs, msgspec, numpy, regex.
Imported by: build, engine, requests.
"""
