"""The synchronous core: sequences, queue, scheduler, finish reasons, the loop around `Engine.step`.

It plans with integers, and knows no tensors, sockets, processes or event loops.

Imports: cache, contract, errors, grammar, grammar_service, log, sampling, sandbox, text; msgspec, numpy.
Imported by: bench, build, data_parallel, kv_offload, serving.
"""
