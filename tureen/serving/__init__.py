"""Clients of an engine: they own its thread or process, and replace it when it is lost.

Imports: config, config_facts, contract, engine, errors, files, log, logit_processor, sandbox,
struct_warm_up; asyncio, msgspec.
Imported by: bench, build, control, fleet, front, fronts, offline, replicas, requests, server.
"""
