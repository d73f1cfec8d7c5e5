"""Jina's API for ordering documents, which llama.cpp and vLLM have too: see docs/embeddings.md."""
