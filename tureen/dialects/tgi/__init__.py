"""The API of Hugging Face's Text Generation Inference: see docs/tgi.md."""
