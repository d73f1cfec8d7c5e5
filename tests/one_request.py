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


def lines_of(text):
    """What a stream of any dialect carries: events, lines, or pieces that a NUL byte ends."""
    if "\0" in text:
        return [json.loads(piece) for piece in text.split("\0") if piece]
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith(("data:", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]
