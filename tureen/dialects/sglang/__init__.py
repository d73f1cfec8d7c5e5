"""SGLang's own API, `/generate` and what belongs to it: see docs/api.md."""
