"""Anthropic's messages API: see docs/anthropic.md."""
