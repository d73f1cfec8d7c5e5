"""From a body to requests and back, whichever dialect it is in: drafts, prompts, media, runs, sessions, quotas.

Imports: config, contract, errors, files, grammar, log, logit_processor, media, metrics, sandbox, serving, text;
asyncio, msgspec, numpy, starlette.
Imported by: control, dialects, front, http, offline, server.
"""
