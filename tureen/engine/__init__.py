"""The synchronous core: sequences, queue, scheduler, finish reasons, the loop around `Engine.step`.

It plans with integers, and knows no tensors, sockets, processes or event loops.

Imports: cache, constraining, contract, errors, grammar, log, sampling, sandbox, text; msgspec, numpy.
Imported by: bench, build, replicas, serving, tiers.
"""
