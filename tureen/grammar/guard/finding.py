"""The facts that a guard holds values to, found in the sets of values that a grammar was written for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from math import floor
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tureen.grammar.expression import ANYTHING, Chars, Expression, GrammarError, Language
from tureen.grammar.free_text import to_the_end
from tureen.grammar.guard.facts import NOWHERE, CountedItems, GuardFacts, GuardNode, KeySet, Variant
from tureen.grammar.regular import automaton
from tureen.grammar.rules import chain, choice, reachable
from tureen.grammar.schema import arrays
from tureen.grammar.schema.digits import Bound
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.ranges import common_step
from tureen.grammar.schema.shapes import ArrayShape, ItemCount, ObjectShape, ValueSet
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.write_objects import writes_free
from tureen.grammar.schema.writer import NoValueError, SchemaWriter

MAX_NODES = 2_000
MAX_BRANCHES = 32
MAX_BRANCH_RULES, MAX_SEEN_RULES = 500, 5_000
"""The most rules of all branches together, which take as long to compile as what they are parts of; and the most that
are gone through for them."""
MAX_KEYS = 1_000
"""The largest number of keys that is waited for."""
MAX_KEY_STATES = 500
BEHIND = to_the_end(
    chain((Chars(((0x20, 0x2A), (0x2C, 0x2C), (0x3A, 0x44), (0x46, 0x64), (0x66, 0x10FFFF))), ANYTHING))
)
"""Whatever follows a value, which goes on with no number."""

Follows: TypeAlias = Callable[[Language], bool]
"""Returns whether a guard may follow a branch: the language of one alternative of a value."""


def follows_all(_: Language) -> bool:
    return True


def follows_none(_: Language) -> bool:
    return False


TOO_MANY = "too many values have alternatives that must be told apart"
TOO_MANY_RULES = "the alternatives that it depends on need too many rules, alone or with others"
TOO_LARGE = "the alternatives that it depends on need too large an automaton, alone or with others"


class _NotFollowedError(GrammarError):
    """The guard may not follow a branch; the message is the reason, as a clause."""


class Guarding(NamedTuple):
    """The facts of a language that a guard enforces, and for which sets of values it does not."""

    facts: GuardFacts | None  # None: nothing
    branches: tuple[Expression, ...]
    rules: Mapping[str, Expression]  # of the branches
    unsure: Mapping[ValueSet, str]  # each with the reason if its branches are not followed, otherwise with ""


def guarding(
    writer: SchemaWriter, root: ValueSet, held: Mapping[str, set[Any]], *, is_tagged: bool, follows: Follows
) -> Guarding:
    """Returns what can be guarded of the values of a set that was written: `held` has, by keyword, the sets that are
    held to it. `is_tagged`: the properties of the whole stand in tags. `follows` selects the branches that the guard
    may follow."""
    every = frozenset(node for nodes in held.values() for node in nodes)
    if not every:
        return Guarding(None, (), {}, {})
    finder = _FactFinder(writer, root, held, is_tagged=is_tagged, follows=follows)
    try:
        finder.find()
    except GrammarError:
        return Guarding(None, (), {}, dict.fromkeys(every, ""))
    unsure = {
        node: finder.unsure.get(node, "") for node in every if node in finder.unsure or node not in finder.reached
    }
    facts = GuardFacts(tuple(finder.nodes)) if finder.nodes else None
    return Guarding(facts, tuple(finder.branches.starts), finder.branches.rules, unsure)


class _WrittenSets:
    """The sets that a grammar was written for, and those inside them."""

    def __init__(self, writer: SchemaWriter, root: ValueSet) -> None:
        self.written = {root, *writer.written}
        self._algebra = writer.algebra

    def leading_to(self, held: Iterable[ValueSet]) -> set[ValueSet]:
        """Returns these sets and those that hold such."""
        sources: dict[ValueSet, list[ValueSet]] = {}
        for node in self.written:
            for inside in self.inside(node):
                sources.setdefault(inside, []).append(node)
        waiting = list(held)
        useful = set(waiting)
        while waiting:
            fresh = [node for node in sources.get(waiting.pop(), ()) if node not in useful]
            useful.update(fresh)
            waiting += fresh
        return useful

    def inside(self, node: ValueSet) -> Iterator[ValueSet]:
        shape = node.shape
        for array in () if shape is None else shape.arrays:
            yield from (*array.prefix, array.rest, *self.counted_items(array))
        for item in () if shape is None else shape.objects:
            yield from (named.node for named in item.named.values())
            yield from (free.node for free in item.free)
            yield from self.needed(item)

    def counted_items(self, shape: ArrayShape) -> Iterator[ValueSet]:
        """Yields the sets that items are written as which are counted by the grammar."""
        algebra = self._algebra
        items: list[ValueSet] = [*shape.prefix, shape.rest] if shape.counts else []
        for want in shape.counts:
            more = (want.node, *([] if want.most is None else [algebra.none_of(want.node)]))
            items += [algebra.both(item, part) for item in items for part in more]
        yield from items

    def needed(self, shape: ObjectShape) -> Iterator[ValueSet]:
        for keys in shape.needed:
            yield from (self._algebra.both(keys.node, free.node) for free in shape.free)


class _Branches:
    """The branches that the guard follows, within the limits of all together."""

    def __init__(self, writer: SchemaWriter, follows: Follows) -> None:
        self.starts: list[Expression] = []
        self.rules: dict[str, Expression] = {}
        self._writer = writer
        self._follows = follows
        self._rules_left = MAX_BRANCH_RULES
        self._num_seen = 0  # rules looked through

    def language(self, values: Expression) -> Language:
        """Returns the language of some values. Raises NoValueError if it is empty, and GrammarError."""
        if self._num_seen > MAX_SEEN_RULES:
            raise _NotFollowedError(TOO_MANY)
        language = self._writer.finished(values)
        self._num_seen += len(language.rules)
        return language

    def add(self, values: Language) -> int:
        """Returns the number of the branch of some values and whatever follows them. Raises _NotFollowedError."""
        if len(self.starts) >= MAX_BRANCHES:
            raise _NotFollowedError(TOO_MANY)
        start = chain((values.start, BEHIND))
        rules = reachable(start, values.rules)
        if len(rules) > self._rules_left:
            raise _NotFollowedError(TOO_MANY_RULES)
        if not self._follows(Language(start, rules)):
            raise _NotFollowedError(TOO_LARGE)
        self._rules_left -= len(rules)
        self.rules.update(rules)
        self.starts.append(start)
        return len(self.starts) - 1


class _FactFinder:
    """Follows the sets from the whole to those inside."""

    def __init__(
        self, writer: SchemaWriter, root: ValueSet, held: Mapping[str, set[Any]], *, is_tagged: bool, follows: Follows
    ) -> None:
        self.nodes: list[GuardNode] = []
        self.branches = _Branches(writer, follows)
        self.reached: set[ValueSet] = set()  # sets whose values the guard reaches
        self.unsure: dict[ValueSet, str] = {}  # reached sets with values that it may miss, and why
        self._writer = writer
        self._root = root
        self._held = held
        self._in_tags = root.shape.objects if is_tagged and root.shape is not None else ()
        self._sets = _WrittenSets(writer, root)
        self._useful = self._sets.leading_to(node for nodes in held.values() for node in nodes)
        self._numbers: dict[ValueSet, int] = {}
        self._waiting: list[ValueSet] = []

    def find(self) -> None:
        """Makes the nodes. Raises GrammarError where there would be too many."""
        self._number(self._root)
        while self._waiting:
            node = self._waiting.pop()
            self.reached.add(node)
            self.nodes[self._numbers[node]] = self._node(node)

    def _number(self, node: ValueSet) -> int:
        """Returns the number of a set's node; NOWHERE where nothing is guarded in it."""
        if node not in self._useful or node not in self._sets.written:
            return NOWHERE
        if node not in self._numbers:
            self._numbers[node] = self._added()
            self._waiting.append(node)
        return self._numbers[node]

    def _added(self, node: GuardNode | None = None) -> int:
        if len(self.nodes) >= MAX_NODES:
            raise GrammarError("too many values are guarded")
        self.nodes.append(node or GuardNode())
        return len(self.nodes) - 1

    def _doubt(self, nodes: Iterable[ValueSet], why: str = "") -> None:
        """Notes that all in some sets is enforced nowhere, or only sometimes. `why`: the reason if their branches are
        not followed."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node in self._useful and node not in self.unsure:
                self.unsure[node] = why
                waiting += self._sets.inside(node)

    def _is_held(self, node: ValueSet, keyword: str) -> bool:
        return node in self._held.get(keyword, ())

    def _node(self, node: ValueSet) -> GuardNode:
        shape = node.shape
        if shape is None:
            return GuardNode()
        facts = GuardNode()
        if self._is_held(node, "multipleOf"):
            facts = self._stepped(node, shape.numbers)
        arrays = [(self._array(node, array), array) for array in shape.arrays]
        objects = [(self._object(node, item), item) for item in shape.objects]
        for kind, options in (("arrays", arrays), ("objects", objects)):
            facts = self._either(node, kind, facts, options)
        return facts

    def _either(self, node: ValueSet, kind: str, facts: GuardNode, options: list[tuple[GuardNode, Any]]) -> GuardNode:
        """Returns the facts with those of the arrays, or of the objects, of a set."""
        if kind == "objects" and len(options) > 1:
            common = self._common(options)
            options = options if common is None else [(common, None)]
        groups: list[tuple[GuardNode, list[Any]]] = []
        for own, shape in options:
            group = next((group for other, group in groups if other == own), None)
            if group is None:
                groups.append((own, [shape]))
            else:
                group.append(shape)
        possible = [own for own, _ in groups]
        if len(groups) > 1:
            try:
                alternatives = self._alternatives(node, groups)
                if len(alternatives) > 1:
                    return msgspec.structs.replace(facts, **{kind: self._variants(node, alternatives)})
            except GrammarError as error:
                self._doubt([node], str(error) if isinstance(error, _NotFollowedError) else "")
                return facts
            possible = [own for own, _ in alternatives]
        if not possible:
            return facts
        own = possible[0]
        names = ARRAY_FACTS if kind == "arrays" else OBJECT_FACTS
        return msgspec.structs.replace(facts, **{name: getattr(own, name) for name in names})

    def _common(self, options: list[tuple[GuardNode, ObjectShape]]) -> GuardNode | None:
        """Returns the facts of objects that are in any of some shapes; None where the key of a value does not tell its
        node."""
        is_free = {id(shape): writes_free(self._writer, shape) for _, shape in options}
        free = [(facts.least_keys, facts.key_sets, facts.others) for facts, shape in options if is_free[id(shape)]]
        if len({facts.least_keys for facts, _ in options}) > 1 or any(other != free[0] for other in free):
            return None
        keys = {}
        for key in dict.fromkeys(key for _, shape in options for key in shape.named):
            having = [facts for facts, shape in options if key in shape.named or is_free[id(shape)]]
            numbers = {facts.node_of(key) for facts in having}
            if len(numbers) > 1:
                return None
            keys[key] = numbers.pop()
        own = options[0][0]
        least, key_sets, others = free[0] if free else (own.least_keys, (), NOWHERE)
        return GuardNode(least_keys=least, keys=keys, key_sets=key_sets, others=others)

    def _alternatives(
        self, node: ValueSet, groups: list[tuple[GuardNode, list[Any]]]
    ) -> list[tuple[GuardNode, Language]]:
        """Returns the facts and the languages of the groups that have values. Raises GrammarError."""
        if self._in_tags and node is self._root:
            raise GrammarError("a value in tags is not written as JSON")
        alternatives = []
        for facts, shapes in groups:
            with suppress(NoValueError):
                language = self.branches.language(choice(self._writer.shape_of(node, shape) for shape in shapes))
                alternatives.append((facts, language))
        return alternatives

    def _variants(self, node: ValueSet, alternatives: list[tuple[GuardNode, Language]]) -> tuple[Variant, ...]:
        """Returns what a value can be. Raises GrammarError."""
        branches = [self.branches.add(language) for _, language in alternatives]
        return tuple(
            Variant(self._added(facts), branch) for (facts, _), branch in zip(alternatives, branches, strict=True)
        )

    def _array(self, node: ValueSet, shape: ArrayShape) -> GuardNode:
        is_unique = shape.is_unique and self._is_held(node, "uniqueItems")
        if shape.counts:
            self._doubt(self._sets.counted_items(shape))
            count = self._counted(node, shape) if self._is_held(node, "contains") else None
            return GuardNode(is_unique=is_unique, count=count)
        return GuardNode(
            is_unique=is_unique, first_items=tuple(map(self._number, shape.prefix)), items=self._number(shape.rest)
        )

    def _counted(self, node: ValueSet, shape: ArrayShape) -> CountedItems | None:
        """Returns how items are counted; None where that cannot be done."""
        tidied = arrays.tidy(self._writer.algebra, shape)
        if tidied is None or not tidied.counts:
            return None
        try:
            [want] = tidied.counts
            first = tuple(self._counting(item, want) for item in tidied.prefix)
            return CountedItems(
                want.start, want.least, want.most, tidied.most, first, self._counting(tidied.rest, want)
            )
        except _NotFollowedError as error:
            self._doubt([node], str(error))
        except (GrammarError, ValueError):
            self._doubt([node])
        return None

    def _counting(self, item: ValueSet, want: ItemCount) -> tuple[Variant, ...]:
        """Returns what an item can be: counted or not. Raises GrammarError."""
        algebra, variants = self._writer.algebra, []
        with suppress(NoValueError):
            inside = self.branches.language(self._writer.value(algebra.both(item, want.node)))
            variants.append(Variant(NOWHERE, self.branches.add(inside), counts=True))
        if want.most is None:
            return (*variants, Variant(NOWHERE, NOWHERE))
        with suppress(NoValueError):
            outside = algebra.both(item, algebra.none_of(want.node))
            language = self.branches.language(self._writer.value(outside))
            variants.append(Variant(NOWHERE, self.branches.add(language)))
        return tuple(variants)

    def _object(self, node: ValueSet, shape: ObjectShape) -> GuardNode:
        self._doubt(self._sets.needed(shape))
        least = shape.least if self._is_held(node, "minProperties") else 0
        if least > MAX_KEYS:
            self._doubt([node])
            least = 0
        key_sets, others = self._free(shape)
        return GuardNode(
            least_keys=least,
            keys={key: self._number(named.node) for key, named in shape.named.items()},
            key_sets=key_sets,
            others=others,
        )

    def _free(self, shape: ObjectShape) -> tuple[tuple[tuple[KeySet, int], ...], int]:
        """Returns the nodes of free keys' values, by sets of keys, and of all other keys' values."""
        free = [keys for keys in shape.free if keys.node is not self._writer.algebra.nothing]
        numbers = list(dict.fromkeys(self._number(keys.node) for keys in free))
        if len(numbers) < 2:
            return (), numbers[0] if numbers else NOWHERE
        if shape in self._in_tags:
            self._doubt(keys.node for keys in free)
            return (), NOWHERE
        key_sets = []
        for keys in free:
            number = self._number(keys.node)
            if number == NOWHERE:
                continue
            try:
                key_sets.append((_key_set(keys.names), number))
            except GrammarError:
                self._doubt([keys.node])
        return tuple(key_sets), NOWHERE

    def _stepped(self, node: ValueSet, numbers: NumberSet) -> GuardNode:
        """Returns the facts of numbers that are multiples; none where there are several kinds of them."""
        if numbers.points or len(numbers.ranges) != 1 or numbers.ranges[0].against or numbers.ranges[0].without:
            self._doubt([node])
            return GuardNode()
        [part] = numbers.ranges
        step = common_step(part.steps)
        exact = Decimal(step.numerator) / Decimal(step.denominator)
        scale = max(0, -int(exact.normalize().as_tuple().exponent))
        bounds = (_text(part.low, scale, 1), _text(part.high, scale, -1))
        return GuardNode(step=(int(step * 10**scale), scale), bounds=bounds)


ARRAY_FACTS = ("is_unique", "first_items", "items", "count")
OBJECT_FACTS = ("least_keys", "keys", "key_sets", "others")


def _key_set(names: StringSet) -> KeySet:
    machine = automaton(names.expression, MAX_KEY_STATES)
    return KeySet(machine.moves, machine.accepting)


def _text(bound: Bound | None, scale: int, sign: int) -> str | None:
    """Returns the nearest number within a bound that has `scale` decimals, as a fraction; None without a bound. `sign`:
    1 for a lower bound, -1 for an upper one."""
    if bound is None:
        return None
    value = Fraction(bound.value)
    if bound.is_open:
        value = sign * Fraction(floor(sign * value * 10**scale) + 1, 10**scale)
    return str(value)
