"""Cohere's API for ordering documents: see docs/embeddings.md."""
