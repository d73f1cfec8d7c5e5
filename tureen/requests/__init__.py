"""This package is the part of a request that every API shares: drafts that become engine requests, prompts, chats,
pictures and videos, the run of requests and the stream of their events, sessions, quotas, recorded answers.

It knows no route and writes no answer.

Imports: config, constraining, contract, errors, files, grammar, log, logit_processor, media, metrics, registry,
sandbox, serving, storage, text; asyncio, msgspec, numpy, starlette.
Imported by: control, dialects, fleet, front, fronts, http, offline, server.
"""
