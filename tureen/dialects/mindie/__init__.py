"""The `/generate` of MindIE and of vLLM's demo server: see docs/mindie.md."""
