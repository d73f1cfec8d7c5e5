"""The API of Hugging Face's Text Embeddings Inference: see docs/embeddings.md."""
