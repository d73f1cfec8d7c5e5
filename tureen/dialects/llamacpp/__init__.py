"""llama.cpp's own API: see docs/llamacpp.md."""
