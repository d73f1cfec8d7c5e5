"""Several engines of one model behind one port: which one a request goes to, and what becomes of it when that one is
lost. Imported only where there are several.

Imports: build, config, contract, devices, engine, errors, extras, fleet, http, log, sandbox, serving,
terminal, struct_warm_up, weights; asyncio, cryptography, msgspec, ray.
Imported by: bench, fronts.
"""
