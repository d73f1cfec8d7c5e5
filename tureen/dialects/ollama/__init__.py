"""Ollama's API: see docs/ollama.md."""
