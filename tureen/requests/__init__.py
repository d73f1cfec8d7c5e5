"""This package handles the part of a request that all APIs share: drafts that become engine requests, prompts, chats,
pictures and videos, running requests and streaming their events.

It defines no route and writes no answer.

Imports: clients, config, contract, errors, fields, files, grammar, grammar_service, log, media, metrics, recordings,
sandbox, serving, sessions, storage, text; asyncio, msgspec, numpy.
Imported by: admin, api_workers, app, dialects, http, multi_model, offline.
"""
