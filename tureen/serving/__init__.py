"""Clients of an engine: they own its thread or process, and replace it when it is lost.

Imports: config, engine, errors, log, logit_processor, sandbox, types; asyncio, msgspec.
Imported by: bench, build, front, offline, requests, server.
"""
