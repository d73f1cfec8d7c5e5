"""This package turns text into tokens and tokens into text: tokenizer, detokenizer with stops, chat templates, and the
parsers of reasoning and tool calls.

Imports: contract, errors, files, log; jinja2, msgspec, numpy, regex, tokenizers.
Imported by: admin, api_workers, app, bench, build, dialects, engine, fields, http, requests, sessions, weights.
"""
