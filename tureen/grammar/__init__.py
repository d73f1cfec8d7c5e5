"""Constraints on outputs: JSON schemas, regular expressions, grammars and tags become one tree of expressions.

Backends compile it for a vocabulary. No tensors, no processes.

Imports: errors; llguidance, msgspec, numpy, outlines_core.
Imported by: build, constraining, contract, engine, requests, runner, sampling.
"""
