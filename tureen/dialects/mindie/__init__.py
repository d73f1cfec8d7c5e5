"""MindIE's and vLLM's dialect of `/generate`."""
