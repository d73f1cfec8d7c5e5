"""This package has the routes that operate the server: health, facts, metrics, sessions, adapters, weights, profiles,
pauses. Most follow SGLang's.

Imports: clients, config, config_facts, contract, devices, errors, extras, fetching, fields, http, log, media, metrics,
requests, runner, sandbox, serving, sessions, temporary_folder, text, weights; asyncio, msgspec, starlette.
Imported by: app.
"""
