"""This package handles the part of a request that all APIs share: drafts that become engine requests, prompts, chats,
pictures and videos, running requests and streaming their events, sessions, quotas, recorded answers.

It defines no route and writes no answer.

Imports: config, constraining, contract, errors, files, grammar, log, logit_processor, media, metrics, registry,
sandbox, serving, storage, text; asyncio, msgspec, numpy, starlette.
Imported by: control, dialects, fleet, front, fronts, http, offline, server.
"""
