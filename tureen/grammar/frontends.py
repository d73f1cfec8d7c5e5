"""Frontends: a constraint, as a client sent it, becomes its language; one function reads each kind."""

from __future__ import annotations

from dataclasses import replace

from tureen.errors import echo
from tureen.grammar import regex
from tureen.grammar.base import CompiledGrammar, GrammarSpec, Vocabulary, max_bytes
from tureen.grammar.expression import Chain, Choice, Expression, GrammarError, Language, Text
from tureen.grammar.follower import LanguageCompiler
from tureen.grammar.free_text import to_the_end, up_to
from tureen.grammar.guard.finding import Follows, follows_all, follows_none
from tureen.grammar.guard.guarded import load_guarded
from tureen.grammar.json_text import check_characters, decoded, strings
from tureen.grammar.notations import grammar
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.regular import is_empty
from tureen.grammar.remembered import forget_all, keep_all
from tureen.grammar.rules import calls
from tureen.grammar.schema import meta_schemas
from tureen.grammar.schema.formats import FORMATS, format_strings
from tureen.grammar.schema.language import json_schema
from tureen.grammar.structural_tag import structural_tag

PRACTICE = GrammarSpec(
    "json_schema",
    r'{"properties": {"a": {"type": "string", "pattern": "^\\p{L}\\w$", "maxLength": 9}, "b": {"type": "number"}}, '
    r'"patternProperties": {"^\\d": {"type": "array", "items": {"type": "integer", "minimum": 1}}}, "required": ["a"]}',
)
"""Has what takes long the first time: the categories of Unicode 0.2 s. The formats take 0.05 s."""
MAX_MARKER_BYTES = 1024
MAX_CHOICES = 10_000
MAX_BRANCH_BYTES, TOO_LARGE_BYTES = 32 << 20, 8 << 20
"""The most bytes of the programs of all branches that are compiled alone, and the bytes that count for a branch that is
too large. 8 MiB take up to 0.6 s of the 10 s that a constraint may take."""


def compile_grammar(spec: GrammarSpec, compiler: LanguageCompiler) -> CompiledGrammar:
    """Compiles a constraint for the compiler's vocabulary. Raises GrammarError where it cannot be kept; see
    `language_of`.

    It takes as much time and memory as the constraint asks for: a stranger's is compiled in a process with limits.
    """
    language, program = translate(language_of(spec, compiler.vocabulary), spec, compiler)
    return load_guarded(program, language.guard, compiler)


def translate(language: Language, spec: GrammarSpec, compiler: LanguageCompiler) -> tuple[Language, bytes]:
    """Compiles the language of a constraint together with the branches of its guard.

    If both are too large together, reads the constraint again with only the branches that compile alone. If these are
    too large together, reads it without branches. The keywords that need another branch are listed as unenforced, or
    refused if they are strict. Raises GrammarError.
    """
    try:
        return language, compiler.translate(language)
    except GrammarError:
        if not language.branches:
            raise
    compiler.translate(replace(language, branches=()))  # raises if the branches are not the reason
    language = language_of(spec, compiler.vocabulary, follows=_CompilesAlone(compiler))
    try:
        return language, compiler.translate(language)
    except GrammarError:
        if not language.branches:
            raise
    language = language_of(spec, compiler.vocabulary, follows=follows_none)
    return language, compiler.translate(language)


class _CompilesAlone:
    """Returns whether a branch compiles alone. Refuses every branch after MAX_BRANCH_BYTES of programs."""

    def __init__(self, compiler: LanguageCompiler) -> None:
        self._compiler = compiler
        self._bytes_left = MAX_BRANCH_BYTES

    def __call__(self, branch: Language) -> bool:
        if self._bytes_left <= 0:
            return False
        try:
            self._bytes_left -= len(self._compiler.translate(branch))
        except GrammarError:
            self._bytes_left -= TOO_LARGE_BYTES
            return False
        return self._bytes_left >= 0


def practise() -> None:
    """Works out what many constraints need and is kept: workers that are forked later inherit it."""
    language_of(PRACTICE)
    meta_schemas.load()  # workers may open no file
    for name in FORMATS:
        strings = format_strings(name)
        if strings is not None and not strings.is_empty():
            strings.encoded()
    keep_all()


def language_of(spec: GrammarSpec, vocabulary: Vocabulary | None = None, *, follows: Follows = follows_all) -> Language:
    """Reads a constraint. What of a schema cannot be enforced is left out, and listed, unless the constraint is strict.
    `vocabulary`: the one that numbers of tokens are about. `follows`: see `json_schema`.

    Raises GrammarError, whose message tells the client what is wrong with it.
    """
    forget_all()
    _check_text(spec.text, spec.kind, max_bytes(spec.kind))
    _check_text(spec.after, "the marker that the constraint comes after", MAX_MARKER_BYTES)
    try:
        language = _language(spec, vocabulary, follows=follows)
    except RecursionError:
        raise GrammarError(f"{spec.kind} is nested too deep; nest less") from None
    except MemoryError:
        raise GrammarError(f"{spec.kind} is too large; make it smaller") from None
    if spec.after:
        guard = None if language.guard is None else language.guard.after(spec.after)
        start = Chain((up_to((spec.after,), (spec.after,)), language.start))
        language = replace(language, start=start, guard=guard)
    return language


def _check_text(text: str, name: str, most: int) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise GrammarError(f"{name} is too large: {size} bytes; at most {most}")
    if "\0" in text:
        raise GrammarError(f"{name} holds a NUL character; remove it")
    check_characters(text, name)


def _language(spec: GrammarSpec, vocabulary: Vocabulary | None, *, follows: Follows) -> Language:
    flavour: PythonFlavour = "python" if spec.unicode_classes else "python-ascii"
    match spec.kind:
        case "json_schema":
            return json_schema(spec.text, strict=spec.strict, guards=True, follows=follows)
        case "structural_tag":
            return structural_tag(
                spec.text, strict=spec.strict, vocabulary=vocabulary, flavour=flavour, follows=follows
            )
        case "regex":
            return Language(_whole(_regex(spec.text, flavour)))
        case "ebnf":
            language = grammar(spec.text, flavour)
            return Language(_whole(language.start), language.rules)
        case "choice":
            return Language(_whole(_choice(spec.text)))


def _whole(expression: Expression) -> Expression:
    """Makes a regular expression a single terminal, as nothing follows it."""
    return expression if any(calls(expression)) else to_the_end(expression)


def _regex(pattern: str, flavour: PythonFlavour) -> Expression:
    expression = regex.parse(pattern, flavour=flavour)
    if is_empty(expression):
        raise GrammarError(
            f"regex {echo(pattern)}: no string matches this pattern, because its parts contradict each other"
        )
    return expression


def _choice(text: str) -> Expression:
    texts = strings(decoded(text, "choice"), "choice")
    if len(texts) > MAX_CHOICES:
        raise GrammarError(f"choice has too many texts: {len(texts)}; at most {MAX_CHOICES}")
    return Choice(tuple(Text(item) for item in texts))
