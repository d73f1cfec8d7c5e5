"""Compilers of a language for a vocabulary, one a file, and the registry that finds them by name."""
