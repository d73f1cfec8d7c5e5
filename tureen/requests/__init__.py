"""What any API asks for and gets, whichever it is: drafts that become requests, prompts, chats, pictures, the run of
requests and the stream of their events, sessions, quotas, recordings.

It knows no route and writes no answer.

Imports: config, constraining, contract, errors, files, grammar, log, logit_processor, media, metrics, sandbox, serving,
text; asyncio, msgspec, numpy, starlette.
Imported by: control, dialects, front, http, offline, server.
"""
