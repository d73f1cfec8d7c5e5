"""The fields of request bodies: their names, types and limits, and the rule for each field that cannot act (rejected,
or reported as ignored).

It knows no server and no model. Dialects and `requests` read bodies with it.

Imports: config, contract, errors, grammar, log, logit_processor, registry, text; msgspec.
Imported by: admin, app, dialects, http, requests.
"""
