"""vLLM's API of token ids: see docs/operations.md."""
