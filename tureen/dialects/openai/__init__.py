"""OpenAI's API: see docs/openai.md."""
