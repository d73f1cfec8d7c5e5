"""How many different values of a schema can be written, where that is easily counted."""

from __future__ import annotations

from math import prod

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema.arrays import item_at
from tureen.grammar.schema.protocols import RuleWriter
from tureen.grammar.schema.shapes import ArrayShape, ObjectShape, ValueSet
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.write_objects import writes_free
from tureen.grammar.small_sets import few_strings

MAX_COUNTED = 10_000
MAX_DEPTH = 6  # arrays and objects in each other
MAX_ITEMS = 100  # of an array
MAX_PROPERTIES = 100  # of an object


def num_values(writer: RuleWriter, node: ValueSet, depth: int = 0) -> int | None:
    """Returns a number that the number of different values of a set does not exceed. It is exact, unless alternatives
    of the set overlap or bound the number of properties. Returns None for more than MAX_COUNTED, or if it is not easily
    counted."""
    if depth > MAX_DEPTH:
        return None
    try:
        shape = writer.algebra.shape(node)
    except GrammarError:
        return None
    numbers = () if shape.numbers.is_empty() else shape.numbers.values
    counts = [shape.plain.bit_count(), None if numbers is None else len(numbers), _num_strings(shape.strings)]
    for array in shape.arrays if None not in counts else ():
        counts.append(_num_arrays(writer, array, depth))
    for object_ in shape.objects if None not in counts else ():
        counts.append(_num_objects(writer, object_, depth))
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) and sum(known) <= MAX_COUNTED else None


def num_values_of_any(writer: RuleWriter, nodes: tuple[ValueSet, ...]) -> int | None:
    """Returns a number that the number of different values in any of the sets does not exceed, or None."""
    counts = [num_values(writer, node) for node in dict.fromkeys(nodes)]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _num_strings(strings: StringSet) -> int | None:
    if strings.is_empty():
        return 0
    if strings.values is not None:
        return len(strings.values)
    few = few_strings(strings.encoded())
    return None if few is None else len(set(few))


def _num_arrays(writer: RuleWriter, shape: ArrayShape, depth: int) -> int | None:
    """Counts by length: of different items, one that is in the same set as those before has fewer values left."""
    total, of_length, nodes = 0, 1, dict[ValueSet, int]()
    for length in range(MAX_ITEMS):
        if length >= shape.least:
            total += of_length
        if shape.most == length or of_length == 0:
            return total
        node = item_at(shape, length)
        count = num_values(writer, node, depth + 1)
        if count is None or total > MAX_COUNTED or of_length > MAX_COUNTED:
            return None
        nodes[node] = nodes.get(node, 0) + 1
        of_length *= max(count - (nodes[node] - 1 if shape.is_unique else 0), 0)
    return None


def _num_objects(writer: RuleWriter, shape: ObjectShape, depth: int) -> int | None:
    has_free = any(not writer.algebra.is_nothing(part.node) for part in shape.free if not part.names.is_empty())
    if len(shape.named) > MAX_PROPERTIES or (has_free and writes_free(writer, shape)):
        return None
    choices: list[int] = []
    for named in shape.named.values():
        count = num_values(writer, named.node, depth + 1)
        if count is None or prod(choices) > MAX_COUNTED:
            return None
        choices.append(count + (not named.is_required))
    return prod(choices)
