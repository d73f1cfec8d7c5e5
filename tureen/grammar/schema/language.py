"""JSON schema: from its text to the language of the JSON texts that are valid against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tureen.grammar.expression import GrammarError, Language
from tureen.grammar.guard.facts import GuardFacts
from tureen.grammar.guard.finding import Follows, follows_all, guarding
from tureen.grammar.schema.algebra import Algebra
from tureen.grammar.schema.document import Document, parse
from tureen.grammar.schema.reader import SchemaReader
from tureen.grammar.schema.shapes import ValueSet
from tureen.grammar.schema.tagged import STYLES, kept_out, tagged, without_texts
from tureen.grammar.schema.unenforced import UnenforcedKeywords
from tureen.grammar.schema.writer import SchemaWriter
from tureen.grammar.tagged_steps import NOTHING_TOLD, TaggedValue, TaggedValues

ANY_VALUE = "$$ANY$$"
"""In the place of a schema: any JSON value."""


def json_schema(
    text: str,
    prefix: str = "",
    *,
    leaves_out: bool = True,
    strict: bool = False,
    guards: bool = False,
    follows: Follows = follows_all,
) -> Language:
    """Returns the valid values as `json.dumps` writes them by default, but with characters that are not ASCII raw.

    `text` is the schema's JSON. The names of the rules begin with `prefix`. What cannot be enforced exactly is left
    out, and listed in the language's `unenforced`; with `strict` it is refused. Raises GrammarError, also for a schema
    that is wrong, or that nothing is valid against.

    With `guards`, what a guard can do of what is left out is its: it is not listed in `unenforced` but in `guarded`,
    and the language has its facts. `follows` selects the branches that the guard may follow: it enforces nothing of a
    value with another one.

    With `leaves_out`, an object with `properties` has no other keys unless its schema speaks of such by a keyword
    (additionalProperties, patternProperties, unevaluatedProperties, propertyNames, a count): JSON Schema would have a
    model invent keys for ever.
    """
    document = Document(True if text == ANY_VALUE else parse(text))
    unenforced = UnenforcedKeywords(document, strict=strict, guards=guards)
    algebra = Algebra(unenforced)
    try:
        node = SchemaReader(document, algebra, unenforced).node(document.root, ())
        writer = SchemaWriter(algebra, prefix, leaves_out=leaves_out)
        language = writer.language(node)
        if guards:
            return _guarded(language, writer, node, strict=strict, follows=follows)
        return replace(language, unenforced=unenforced.listed())
    except RecursionError:
        raise GrammarError("its schemas are nested or refer to each other too deep") from None


def _guarded(
    language: Language,
    writer: SchemaWriter,
    whole: ValueSet,
    *,
    strict: bool,
    follows: Follows,
    is_tagged: bool = False,
) -> Language:
    """Gives a language the facts for a guard; raises GrammarError if strict and something is left for neither."""
    unenforced = writer.algebra.unenforced
    done = guarding(writer, whole, unenforced.holders, is_tagged=is_tagged, follows=follows)
    guarded, left_out = unenforced.sorted_out(done.unsure)
    if strict and left_out:
        raise GrammarError(left_out[0].why)
    rules = {**done.rules, **language.rules}
    return replace(
        language, rules=rules, unenforced=left_out, guard=done.facts, guarded=guarded, branches=done.branches
    )


def tagged_schema(
    text: str,
    style: str,
    prefix: str,
    excludes: Sequence[str] = (),
    *,
    strict: bool = False,
    follows: Follows = follows_all,
) -> tuple[Language, TaggedValues]:
    """Returns the valid objects with their properties in tags, in one of STYLES, and the values that are guarded.

    No string and no key holds one of `excludes`, nor what ends a property. `strict`, `follows`: see json_schema,
    with `guards`.
    Raises GrammarError.
    """
    document = Document(parse(text))
    unenforced = UnenforcedKeywords(document, strict=strict, guards=True)
    algebra = Algebra(unenforced)
    try:
        node = SchemaReader(document, algebra, unenforced).node(document.root, ())
        writer = SchemaWriter(algebra, prefix, leaves_out=True)
        language = tagged(writer, node, STYLES[style], excludes)
        language = _guarded(language, writer, node, strict=strict, follows=follows, is_tagged=True)
        language = without_texts(language, kept_out(STYLES[style], excludes))
        return language, _tagged_values(algebra, node, language.guard)
    except RecursionError:
        raise GrammarError("its schemas are nested or refer to each other too deep") from None


def _tagged_values(algebra: Algebra, node: ValueSet, facts: GuardFacts | None) -> TaggedValues:
    if facts is None:
        return NOTHING_TOLD
    shapes = algebra.shape(node).objects
    named: dict[str, list[ValueSet]] = {}
    for shape in shapes:
        for key, (_, value) in shape.named.items():
            named.setdefault(key, []).append(value)
    free = [value for shape in shapes for _, value in shape.free]

    def tagged_value(number: int, values: list[ValueSet]) -> TaggedValue:
        return TaggedValue(number, any(not algebra.shape(value).strings.is_empty() for value in values))

    whole = facts.nodes[0]
    keys = {key: tagged_value(whole.node_of(key), values) for key, values in named.items()}
    return TaggedValues(keys, tagged_value(whole.others, free))
