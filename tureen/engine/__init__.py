"""The synchronous core: sequences, queue, scheduler, finish reasons, the loop around `Engine.step`.

It plans with integers, and knows no tensors, sockets, processes or event loops.

Imports: cache, constraining, errors, grammar, log, runner, sampling, sandbox, text, types; msgspec, numpy.
Imported by: bench, build, front, serving.
"""
