"""A library that holds a language model's output to a JSON schema, a regular expression, a grammar or tags.

README.md in this folder says how it is used without the server. A constraint becomes a tree of expressions,
which is compiled for a vocabulary. No tensors, processes or threads.

Imports: errors; msgspec, numpy, regex.
Imported by: bench, build, contract, engine, fields, grammar_service, requests, runner, sampling.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tureen.grammar.base import CompiledGrammar, Encode, Grammar, GrammarSpec, Mask, Vocabulary
from tureen.grammar.expression import GrammarError, Language, TooComplex, Unenforced
from tureen.grammar.follower import LanguageCompiler

if TYPE_CHECKING:
    from tureen.grammar.frontends import compile_grammar, language_of, practise

__all__ = [
    "CompiledGrammar",
    "Encode",
    "Grammar",
    "GrammarError",
    "GrammarSpec",
    "Language",
    "LanguageCompiler",
    "Mask",
    "TooComplex",
    "Unenforced",
    "Vocabulary",
    "compile_grammar",
    "language_of",
    "practise",
]


def __getattr__(name: str) -> Any:
    """Imports the frontends when one of their names is first asked for: a server needs them in its workers only."""
    if name in ("compile_grammar", "language_of", "practise"):
        return getattr(importlib.import_module("tureen.grammar.frontends"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
