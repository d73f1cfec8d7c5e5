"""Arrays as expressions: by position, by how many items are in given sets, and by which items are used up."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from tureen.grammar.expression import EMPTY, NOTHING, Expression, GrammarError, RuleCall, SchemaError, Terminal, Text
from tureen.grammar.rules import chain, choice, repeat
from tureen.grammar.schema import arrays
from tureen.grammar.schema.arrays import item_at
from tureen.grammar.schema.finite import num_values_of_any
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.protocols import RuleWriter
from tureen.grammar.schema.shapes import FALSE, NULL, TRUE, ArrayShape, ItemCount, ValueSet
from tureen.grammar.schema.strings import StringSet

WORDS = ((NULL, Terminal(Text("null"))), (TRUE, Terminal(Text("true"))), (FALSE, Terminal(Text("false"))))
MAX_STATES = 2_000
MAX_UNIQUE = 8
"""How many different values the items of an array with uniqueItems may have: there are 2 ** 8 sets of them."""

OPEN, CLOSE, COMMA = Terminal(Text("[")), Terminal(Text("]")), Terminal(Text(", "))

Write = Callable[[RuleWriter, ArrayShape], Expression]

State = tuple[int, tuple[int, ...]]
"""How many items there are (up to where the number makes no difference), and how many of each wanted set."""


def write_array(writer: RuleWriter, shape: ArrayShape) -> Expression:
    """Returns the texts of the arrays, and of more where that cannot be enforced."""
    tidied = arrays.tidy(writer.algebra, shape)
    if tidied is not None and tidied.is_unique:
        tidied = _that_can_differ(writer, tidied)
    if tidied is None:
        return NOTHING
    body: Expression | None = None
    if tidied.is_unique and not _is_surely_unique(writer, tidied):
        body = _attempt(_unique, writer, tidied, "uniqueItems")
    if body is None and tidied.counts:
        body = _attempt(_counted, writer, tidied, "contains")
    return chain((OPEN, _plain(writer, tidied) if body is None else body, CLOSE))


def _attempt(write: Write, writer: RuleWriter, shape: ArrayShape, keyword: str) -> Expression | None:
    """Returns what it writes; None, and it is noted, where the keyword cannot be enforced."""
    try:
        return write(writer, shape)
    except SchemaError:
        raise
    except GrammarError as error:
        writer.leave_out(keyword, str(error), to_guard=True)
        return None


def _plain(writer: RuleWriter, shape: ArrayShape) -> Expression:
    """Items by their position only."""
    length, least, most = len(shape.prefix), shape.least, shape.most
    rest = writer.value(shape.rest)
    fewest = max(least - length, 0)
    if length == 0:
        first = chain((rest, repeat(chain((COMMA, rest)), max(fewest - 1, 0), None if most is None else most - 1)))
        return first if least else choice((EMPTY, first))
    after = [repeat(chain((COMMA, rest)), fewest, None if most is None else most - length)]
    for index in range(length - 1, 0, -1):
        after = [COMMA, writer.value(shape.prefix[index]), *after]
        if index >= least:
            after = [writer.rule(repeat(chain(after), 0, 1))]
    first = chain((writer.value(shape.prefix[0]), *after))
    return first if least else choice((EMPTY, first))


def _counted(writer: RuleWriter, shape: ArrayShape) -> Expression:
    """Items by their position, and by how many before them were in each of the wanted sets.

    Where there is no upper bound, an item that is in the set need not be counted, so no complement is needed.
    """
    last = max(len(shape.prefix), shape.least, shape.most or 0, 1, *(want.start for want in shape.counts))
    start = (0, (0,) * len(shape.counts))
    states: dict[State, RuleCall] = {start: writer.reserve()}
    waiting = [start]
    bodies: dict[State, Expression] = {}
    while waiting:
        state = waiting.pop()
        index, counts = state
        is_enough = all(number >= want.least for number, want in zip(counts, shape.counts, strict=True))
        options: list[Expression] = [EMPTY] if is_enough and index >= shape.least else []
        items = _next_items(writer, shape, index, counts) if shape.most is None or index < shape.most else []
        for node, after in items:
            target = (min(index + 1, last), after)
            if target not in states:
                states[target] = writer.reserve()
                waiting.append(target)
            options.append(chain((COMMA if index else EMPTY, writer.value(node), states[target])))
        if len(states) > MAX_STATES:
            raise GrammarError(
                f'"contains" (or a complement of "items") with these bounds needs more than {MAX_STATES}'
                f" states: let minContains, maxContains, minItems and maxItems be smaller"
            )
        bodies[state] = choice(options)
    for state, body in bodies.items():
        writer.define(states[state], body)
    return states[start]


def _next_items(
    writer: RuleWriter, shape: ArrayShape, index: int, counts: tuple[int, ...]
) -> list[tuple[ValueSet, tuple[int, ...]]]:
    """Returns the sets that can come at this index, each with the counts after it."""
    items: list[tuple[ValueSet, tuple[int, ...]]] = [(item_at(shape, index), ())]
    for want, number in zip(shape.counts, counts, strict=True):
        items = [
            (writer.algebra.all_of((node, more)), (*before, after))
            for node, before in items
            for more, after in _count_item(writer, want, index, number)
        ]
    return [(node, after) for node, after in items if not writer.algebra.is_nothing(node)]


def _count_item(writer: RuleWriter, want: ItemCount, index: int, number: int) -> list[tuple[ValueSet, int]]:
    """Whether the item at this index is counted: what it must be in then, and the number after it."""
    anything = writer.algebra.anything
    if index < want.start:
        return [(anything, number)]
    if want.most is None:
        return [(anything, number)] if number == want.least else [(want.node, number + 1), (anything, number)]
    outside = [(writer.algebra.none_of(want.node), number)]
    return outside if number == want.most else [(want.node, number + 1), *outside]


def _is_surely_unique(writer: RuleWriter, shape: ArrayShape) -> bool:
    """There are few enough items, each of which must be in another set."""
    if shape.most is None or shape.most > len(shape.prefix):
        return False
    return all(
        writer.algebra.is_nothing(writer.algebra.all_of((node, other)))
        for index, node in enumerate(shape.prefix)
        for other in shape.prefix[:index]
    )


def _that_can_differ(writer: RuleWriter, shape: ArrayShape) -> ArrayShape | None:
    """Returns arrays of different items with no more of them than there are values; None where these are too few."""
    nodes = (*shape.prefix, *([shape.rest] if shape.most is None or shape.most > len(shape.prefix) else []))
    for want in shape.counts:
        meets = tuple(writer.algebra.all_of((node, want.node)) for node in nodes) if want.least > 1 else ()
        count = num_values_of_any(writer, meets) if meets else None
        if count is not None and want.least > count:
            return None
    try:
        num = len(set().union(*(_few_values(writer, node) for node in nodes)))
    except GrammarError:
        counted = num_values_of_any(writer, nodes)
        if counted is None:
            return shape
        num = counted
    most = arrays.lesser(shape.most, num)
    return None if most is not None and most < shape.least else replace(shape, most=most)


def _unique(writer: RuleWriter, shape: ArrayShape) -> Expression:
    """Writes arrays of different items by the set of items so far, where there are few possible ones. Raises
    GrammarError."""
    values = {
        node: _few_values(writer, node)
        for node in (*shape.prefix, *([shape.rest] if shape.most is None or shape.most > len(shape.prefix) else []))
    }
    if shape.counts or len(set().union(*values.values())) > MAX_UNIQUE:
        raise _not_unique()
    states: dict[frozenset[Hashable], RuleCall] = {frozenset(): writer.reserve()}
    waiting = list(states)
    while waiting:
        used = waiting.pop()
        index = len(used)
        options: list[Expression] = [EMPTY] if index >= shape.least else []
        fits = shape.most is None or index < shape.most
        for value, text in values[item_at(shape, index)].items() if fits else ():
            after = used | {value}
            if value not in used:
                if after not in states:
                    states[after] = writer.reserve()
                    waiting.append(after)
                options.append(chain((COMMA if index else EMPTY, text, states[after])))
        writer.define(states[used], choice(options))
    return states[frozenset()]


def _few_values(writer: RuleWriter, node: ValueSet) -> dict[Hashable, Expression]:
    """The values of a node, with their texts. Raises GrammarError where they are not few or not simple."""
    shape = writer.algebra.shape(node)
    if shape.arrays or shape.objects:
        raise _not_unique()
    texts: dict[Hashable, Expression] = {bit: word for bit, word in WORDS if shape.plain & bit}
    strings = () if shape.strings.is_empty() else shape.strings.values
    numbers = () if shape.numbers.is_empty() else shape.numbers.values
    if strings is None or numbers is None:
        raise _not_unique()
    texts.update((value, StringSet.only([value]).encoded()) for value in strings)
    texts.update((("number", value), NumberSet.only([value]).encoded()) for value in numbers)
    return texts


def _not_unique() -> GrammarError:
    return GrammarError(
        f'"uniqueItems": true can be enforced only where the items have at most {MAX_UNIQUE} different'
        f' values ("enum", "const", booleans, null) or cannot be equal anyway: leave it out'
    )
