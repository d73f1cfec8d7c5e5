"""Constraints on outputs: JSON schemas, regular expressions, grammars and tags become one tree of expressions.

Backends compile it for a vocabulary, in worker processes. No tensors.

Imports: errors, log, sandbox; asyncio, jsonschema_rs, llguidance, msgspec, numpy, outlines_core, regex.
Imported by: build, contract, engine, requests, runner, sampling.
"""
