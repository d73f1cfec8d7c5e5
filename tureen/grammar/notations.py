"""A grammar in whichever notation it is written."""

from __future__ import annotations

from tureen.grammar.ebnf import ebnf
from tureen.grammar.expression import Language
from tureen.grammar.lark import is_lark, lark
from tureen.grammar.regex_classes import PythonFlavour


def grammar(text: str, flavour: PythonFlavour) -> Language:
    """Returns the language of a grammar as llama.cpp writes it (`root ::= …`) or as Lark does (`start: …`), without
    Terminals. `flavour`: of the regular expressions in it. Raises GrammarError."""
    return lark(text, flavour) if is_lark(text) else ebnf(text, flavour)
