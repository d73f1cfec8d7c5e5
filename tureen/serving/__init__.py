"""Clients of an engine: they own its thread or process, and replace it when it is lost.

Imports: config, config_facts, contract, engine, errors, files, log, logit_processor, sandbox,
struct_warm_up; asyncio, msgspec.
Imported by: admin, api_workers, app, bench, build, clients, data_parallel, multi_model, offline, requests, server.
"""
