"""Objects as expressions: named keys in their order, then free keys."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from json.encoder import encode_basestring

from tureen.grammar.expression import EMPTY, NOTHING, Chain, Expression, GrammarError, RuleCall, Terminal, Text
from tureen.grammar.regular import strings_of
from tureen.grammar.rules import chain, choice, repeat
from tureen.grammar.schema.protocols import RuleWriter
from tureen.grammar.schema.shapes import ObjectShape, PropertySet, ValueSet
from tureen.grammar.schema.strings import StringSet

COLON = Text(": ")
MAX_LISTED = 2_000
"""The most free keys that are counted where there must be some number of them."""
OPEN, CLOSE, COMMA = Terminal(Text("{")), Terminal(Text("}")), Terminal(Text(", "))

Member = tuple[bool, Expression]
"""Whether it must be there; the key and the value."""


def write_object(writer: RuleWriter, shape: ObjectShape) -> Expression:
    """Returns the texts of the objects, and of more where that cannot be enforced."""
    members: list[Member] = []
    for key, (is_required, node) in shape.named.items():
        value = writer.value(node)
        if value != NOTHING:
            name = encode_basestring(key)
            members.append((is_required, chain((Terminal(Text(name + COLON.text)), value))))
        elif is_required:
            return NOTHING
    free = NOTHING if _leaves_out(writer, shape, len(members)) else _free(writer, shape, shape.free)
    num_required = sum(is_required for is_required, _ in members)
    least = shape.least if shape.least > num_required else 0
    most = None if shape.most is not None and free == NOTHING and shape.most >= len(members) else shape.most
    if shape.needed or most is not None or least:
        required = _required_properties(writer, shape)
        if NOTHING in required:
            return NOTHING
        num_free = _num_free(writer, shape) if least and free != NOTHING else None
        body = _Counted(writer, members, free, num_free, required, least, most).body()
    else:
        body = _plain(writer, members, free)
    return chain((OPEN, body, CLOSE))


def writes_free(writer: RuleWriter, shape: ObjectShape) -> bool:
    """Returns whether other keys than the named ones are written."""
    num_members = sum(writer.value(named.node) != NOTHING for named in shape.named.values())
    return not _leaves_out(writer, shape, num_members)


def _leaves_out(writer: RuleWriter, shape: ObjectShape, num_members: int) -> bool:
    is_asked_for = shape.is_open or shape.needed or shape.least > num_members
    return writer.leaves_out and num_members > 0 and not is_asked_for


def _free(writer: RuleWriter, shape: ObjectShape, classes: Iterable[PropertySet]) -> Expression:
    """One free property, whose key is in one of the classes."""
    by_node: dict[ValueSet, StringSet] = {}
    for names, node in classes:
        if node is not writer.algebra.nothing:
            by_node[node] = by_node[node].union(names) if node in by_node else names
    return choice(_free_member(writer, shape, names, node) for node, names in by_node.items())


def _num_free(writer: RuleWriter, shape: ObjectShape) -> int | None:
    """Returns how many different free keys there are; None where these are many."""
    keys = writer.algebra.keys
    count = 0
    for names, node in shape.free:
        if writer.value(node) != NOTHING:
            texts = None
            if names is not keys.every and not names.is_endless:
                with suppress(GrammarError):
                    texts = strings_of(keys.without(names, shape.named).expression, MAX_LISTED)
            if texts is None:
                return None
            count += len(texts)
    return count


def _free_member(writer: RuleWriter, shape: ObjectShape, names: StringSet, node: ValueSet) -> Expression:
    """A property with one of these keys, not a named one; the colon is in the key's terminal, as with named keys."""
    value = writer.value(node)
    if value == NOTHING:
        return NOTHING
    key = writer.algebra.keys.encoded_without(names, shape.named)
    if key is None:
        return NOTHING
    return chain((Terminal(Chain((key.item, COLON)), is_live=True), value))


def _plain(writer: RuleWriter, members: list[Member], free: Expression) -> Expression:
    """Writes objects without counts. All is O(n), and rules call one another O(log n) deep: libraries recurse."""
    num_leading = next((i for i, (is_required, _) in enumerate(members) if is_required), len(members))
    more = repeat(chain((COMMA, free)), 0, None)
    leading = _some_of(writer, [member for _, member in members[:num_leading]])[0] if num_leading else NOTHING
    if num_leading == len(members):
        return choice((chain((leading, more)), chain((free, more)), EMPTY))
    before = repeat(chain((leading, COMMA)), 0, 1) if num_leading else EMPTY
    return chain((before, members[num_leading][1], *map(_after, members[num_leading + 1 :]), more))


def _some_of(writer: RuleWriter, members: list[Expression]) -> tuple[Expression, Expression]:
    """Returns one or more of the members with commas between them, and any number of them with a comma before each."""
    if len(members) == 1:
        return members[0], repeat(chain((COMMA, members[0])), 0, 1)
    middle = len(members) // 2
    first, after_first = _some_of(writer, members[:middle])
    last, after_last = _some_of(writer, members[middle:])
    after_last = writer.rule(after_last)
    return choice((chain((first, after_last)), last)), chain((after_first, after_last))


def _after(member: Member) -> Expression:
    """A member that is not the first one."""
    is_required, expression = member
    following = chain((COMMA, expression))
    return following if is_required else repeat(following, 0, 1)


class _Counted:
    """Objects whose properties are counted, or of which a free one must be there.

    A reader keeps one of several properties with one key, the last. Named keys are written once. Free ones may be
    written twice: where more than one of them is demanded, a guard keeps them different. What is wanted of a free key
    is written last, so that nothing replaces it.
    """

    def __init__(
        self,
        writer: RuleWriter,
        members: list[Member],
        free: Expression,
        num_free: int | None,
        required: list[Expression],
        least: int,
        most: int | None,
    ) -> None:
        self._writer = writer
        self._members = members
        self._free = free
        self._num_free = num_free
        self._least = least
        self._most = most
        self._required = required
        self._rules: dict[tuple[int, int], Expression] = {}

    def body(self) -> Expression:
        # Backwards, so that what a rule calls is there. A count above `cap` makes no difference.
        cap = max(self._least, 1) if self._most is None else self._most
        for index in range(len(self._members), -1, -1):
            num_required = sum(is_required for is_required, _ in self._members[:index])
            for count in range(min(num_required, cap), min(index, cap) + 1):
                self._rules[index, count] = self._state(index, count, cap)
        return self._rules[0, 0]

    def _state(self, index: int, count: int, cap: int) -> Expression:
        """Returns an expression of what can follow `count` of the first `index` members."""
        if index == len(self._members):
            return self._end(count)
        is_required, member = self._members[index]
        more: Expression = NOTHING
        if self._most is None or count < self._most:
            more = chain((COMMA if count else EMPTY, member, self._rules[index + 1, min(count + 1, cap)]))
        rest = more if is_required else choice((more, self._rules[index + 1, count]))
        return self._writer.rule(rest) if not isinstance(rest, RuleCall) and rest != NOTHING else rest

    def _end(self, count: int) -> Expression:
        """Returns an expression of what can follow when there are `count` named properties."""
        have = count + len(self._required)
        least = max(self._least - have, 0)
        most = None if self._most is None else self._most - have
        if most is not None and most < least:
            return NOTHING
        if self._free == NOTHING:
            return NOTHING if least else _listed(self._required, count > 0)
        if least and self._num_free is not None:
            most = self._num_free if most is None else min(most, self._num_free)
            if most < least:
                return NOTHING
        if least > 1 or (least and self._required):
            self._writer.leave_out(
                "minProperties",
                f'"minProperties" (or a complement of "maxProperties") cannot be enforced where more than'
                f' one of {self._least} keys is not in "properties": nothing keeps a key from being written twice',
                to_guard=not self._required,
            )
            least = 0 if self._required else least
        following = self._more(least, most)
        if self._required:
            before = following if count else repeat(chain((self._free, COMMA)), 0, most)
            return chain((before, _listed(self._required, count > 0)))
        if count:
            return following
        if most == 0:
            return EMPTY
        others = repeat(chain((COMMA, self._free)), max(least - 1, 0), None if most is None else most - 1)
        first = chain((self._free, others))
        return first if least else choice((EMPTY, first))

    def _more(self, least: int, most: int | None) -> Expression:
        """Free properties after others."""
        return repeat(chain((COMMA, self._free)), least, most)


def _required_properties(writer: RuleWriter, shape: ObjectShape) -> list[Expression]:
    """For each set of keys of which one must be there, such a property; without those that may be one with another."""
    required: list[PropertySet] = []
    for keys in shape.needed:
        names = writer.algebra.keys.without(keys.names, shape.named)
        if all(writer.algebra.keys.both(names, other.names).is_empty() for other in required):
            required.append(PropertySet(names, keys.node))
        else:
            writer.leave_out(
                "",
                '"not", "oneOf" or "if" cannot be enforced where it demands two properties with keys that'
                ' are not in "properties" and may be the same: name them in "properties"',
            )
    return [
        choice(
            _free_member(
                writer, shape, writer.algebra.keys.both(keys.names, names), writer.algebra.all_of((keys.node, node))
            )
            for names, node in shape.free
        )
        for keys in required
    ]


def _listed(members: list[Expression], is_after: bool) -> Expression:
    """The members with commas between them, and before the first one if it comes after another one."""
    items: list[Expression] = []
    for member in members:
        items += [COMMA, member] if items or is_after else [member]
    return chain(items)
