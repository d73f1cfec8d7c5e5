"""The fields of request bodies: which names there are, what each takes, and what becomes of a field that cannot act
(honoured, rejected, or reported as ignored).

It knows no server and no model. Dialects and `requests` read bodies with it.

Imports: config, contract, errors, grammar, log, logit_processor, registry, text; msgspec.
Imported by: admin, app, dialects, http, requests.
"""
