"""Holds the module that SGLang's clients import."""
