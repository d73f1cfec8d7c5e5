"""Several front processes behind one port: one of them, the owner, has the engine and all that clients come back to;
the others answer what needs neither, and pass it the rest. Imported only where there are several.

Imports: app, build, config, config_facts, contract, data_parallel, errors, http, log, media, metrics, requests,
sandbox, server, serving, text; asyncio, msgspec, prometheus_client, starlette.
Imported by: bench.
"""
