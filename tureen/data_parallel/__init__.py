"""Several engines of one model behind one port: which one a request goes to, and what becomes of it when that one is
lost. Imported only where there are several.

Imports: build, config, config_facts, contract, devices, engine, errors, extras, files, http, log, multi_model, sandbox,
serving, struct_warm_up, terminal, weights; asyncio, cryptography, msgspec, ray.
Imported by: api_workers, bench.
"""
