"""One request in the form of each dialect, and the parts of its streams."""

from __future__ import annotations

import json

SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
USER = [{"role": "user", "content": "abc"}]
DIALECTS = {
    "Anthropic": ("/v1/messages", {"messages": USER, "max_tokens": 12, "ignore_eos": True} | SEEDED),
    "Ollama's chat": ("/api/chat", {"messages": USER, "options": {"num_predict": 12} | SEEDED}),
    "Ollama's prompts": ("/api/generate", {"prompt": "abc", "options": {"num_predict": 12} | SEEDED}),
    "Ollama, raw": ("/api/generate", {"prompt": "abc", "raw": True, "options": {"num_predict": 12} | SEEDED}),
    "TGI": ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 12} | SEEDED}),
    "MindIE": ("/generate", {"prompt": "abc", "max_tokens": 12} | SEEDED),
    "Responses": ("/v1/responses", {"input": "abc", "max_output_tokens": 12} | SEEDED),
    "chat completions": ("/v1/chat/completions", {"messages": USER, "max_tokens": 12} | SEEDED),
    "completions": ("/v1/completions", {"prompt": "abc", "max_tokens": 12} | SEEDED),
}


SHORTEST_WITHOUT_OUTPUT = {
    "OpenAI /v1/embeddings": {"input": "a"},
    "SGLang and vLLM /tokenize": {"prompt": "a"},
    "SGLang and vLLM /detokenize": {"tokens": [97]},
    "SGLang /encode": {"text": "a"},
    "SGLang /v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "SGLang /v1/rerank": {"query": "a", "documents": ["b"]},
    "llama.cpp /tokenize": {"content": "a"},
    "Cohere /v2/rerank": {"query": "a", "documents": ["b"]},
    "Cohere /cohere/v1/rerank": {"query": "a", "documents": ["b"]},
    "Jina /v1/reranking": {"query": "a", "documents": ["b"]},
    "TEI /embed": {"inputs": "a"},
    "TEI /rerank": {"query": "a", "texts": ["b"]},
    "TEI /similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "TEI /predict": {"inputs": "a"},
}
"""For routes that write no text, the shortest body that is taken."""


def lines_of(text):
    """What a stream of any dialect carries: events, lines, or pieces that a NUL byte ends."""
    if "\0" in text:
        return [json.loads(piece) for piece in text.split("\0") if piece]
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith(("data:", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]
