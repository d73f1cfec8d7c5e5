"""The HTTP shell: dialects, the way from a body to requests, the gate with keys and TLS, sessions, quotas, errors.

It knows tokens and text, and no tensors.

Imports: config, devices, engine, errors, files, grammar, log, logit_processor, media, metrics, sampling, sandbox,
serving, text, types, weights; asyncio, cryptography, httptools, msgspec, numpy, starlette, uvicorn.
Imported by: bench, offline, server.
Independent: sglang, mindie, tgi, openai_embeddings, score_routes, tokenize_routes, openai_chat, openai_completions,
openai_responses, anthropic, ollama.
"""
