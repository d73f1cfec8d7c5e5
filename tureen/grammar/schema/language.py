"""JSON schema: from its text to the language of the JSON texts that are valid against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tureen.grammar.expression import GrammarError, Language
from tureen.grammar.guard.finding import GUARDED, guarding
from tureen.grammar.schema.algebra import Algebra
from tureen.grammar.schema.document import Document, parse
from tureen.grammar.schema.reader import SchemaReader
from tureen.grammar.schema.tagged import STYLES, tagged
from tureen.grammar.schema.unenforced import UnenforcedKeywords
from tureen.grammar.schema.writer import SchemaWriter

ANY_VALUE = "$$ANY$$"
"""In the place of a schema: any JSON value."""


def json_schema(
    text: str, prefix: str = "", *, leaves_out: bool = True, strict: bool = False, guards: bool = False
) -> Language:
    """Returns the valid values as `json.dumps` writes them by default, but with characters that are not ASCII raw.

    `text` is the schema's JSON. The names of the rules begin with `prefix`. What cannot be enforced exactly is left
    out, and listed in the language's `unenforced`; with `strict` it is refused. Raises GrammarError, also for a schema
    that is wrong, or that nothing is valid against.

    With `guards`, what a guard can do of what is left out is its: it is not listed, and the language has its facts.

    With `leaves_out`, an object with `properties` has no other keys unless its schema speaks of such by a keyword
    (additionalProperties, patternProperties, unevaluatedProperties, propertyNames, a count): JSON Schema would have a
    model invent keys for ever.
    """
    document = Document(True if text == ANY_VALUE else parse(text))
    unenforced = UnenforcedKeywords(document, strict=strict, guarded=GUARDED if guards else ())
    algebra = Algebra(unenforced)
    try:
        node = SchemaReader(document, algebra, unenforced).node(document.root, ())
        language = SchemaWriter(algebra, prefix, leaves_out=leaves_out).language(node)
        left_out = unenforced.listed()
    except RecursionError:
        raise GrammarError("its schemas are nested or refer to each other too deep") from None
    guard = None
    if guards and left_out:
        done = guarding(document, [(item.keyword, item.schema) for item in left_out])
        guard = done.facts
        left_out = tuple(item for item in left_out if (item.keyword, item.schema) not in done.enforced)
    if strict and left_out:
        raise GrammarError(left_out[0].why)
    return replace(language, unenforced=left_out, guard=guard)


def tagged_schema(
    text: str, style: str, prefix: str, excludes: Sequence[str] = (), *, strict: bool = False
) -> Language:
    """Returns the valid objects with their properties in tags, in one of STYLES. Raises GrammarError.

    No string and no key holds one of `excludes`, nor what ends a property. `strict`: see json_schema.
    """
    document = Document(parse(text))
    unenforced = UnenforcedKeywords(document, strict=strict)
    algebra = Algebra(unenforced)
    try:
        node = SchemaReader(document, algebra, unenforced).node(document.root, ())
        language = tagged(SchemaWriter(algebra, prefix, leaves_out=True), node, STYLES[style], excludes)
        return replace(language, unenforced=unenforced.listed())
    except RecursionError:
        raise GrammarError("its schemas are nested or refer to each other too deep") from None
