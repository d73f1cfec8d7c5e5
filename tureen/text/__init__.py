"""Text on its way in and out: tokenizer, detokenizer, chat templates, reasoning, tool calls.

Imports: contract, errors, files, log; jinja2, msgspec, numpy, regex, tokenizers.
Imported by: bench, build, control, dialects, engine, front, http, requests, weights.
"""
