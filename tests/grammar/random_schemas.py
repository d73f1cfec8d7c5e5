"""Random JSON schemas, random values that are near to them, and random texts of a language."""

from __future__ import annotations

from tureen.grammar import regular
from tureen.grammar.expression import Chain, Choice, Repeat, RuleCall, Terminal, Text

KEYS = ("a", "b", "c", "ab")
PATTERNS = ("^a", "b$", "a", "^a*$", "^[ab]$")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object", "object", "array", ["string", "object"])
FAR = 10**6
"""More steps than any text needs."""


def value(dice, depth=2):
    kind = dice.random() if depth else 0
    if kind < 0.45:
        return dice.choice([None, True, False, 0, 1, 2, 3, -1, 5, "", "a", "b", "ab", "aa", "abc"])
    count = dice.choice([0, 1, 1, 2, 2, 3])
    if kind < 0.7:
        return [value(dice, depth - 1) for _ in range(count)]
    return {key: value(dice, depth - 1) for key in dice.sample(KEYS, count)}


def small(dice):
    return dice.choice([
        *(True, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"const": "a"}, {"enum": ["a", 1, None]}),
        *({"maxLength": 1}, {"minimum": 2}, {"type": "null"}, {"type": "object"}, {"required": ["a"]}, {"maxItems": 1}),
        *({"$ref": "#/$defs/x"}, {"type": "array", "items": {"type": "integer"}}),
    ])  # fmt: skip


def recursive(dice):
    again = {"$ref": "#/$defs/z"}
    return dice.choice([
        {"type": ["array", "integer"], "items": again},
        {"anyOf": [{"type": "null"}, {"properties": {"a": again, "b": small(dice)}, "required": ["a"]}]},
        {"oneOf": [{"type": "integer"}, {"type": "array", "items": again}, {"additionalProperties": again}]},
        {"type": ["object", "string"], "properties": {"a": {"not": again}}, "required": ["a"]},
        {"if": {"type": "array"}, "then": {"items": again, "maxItems": 2}, "else": {"type": ["string", "null"]}},
        {"type": "object", "properties": {"a": again}, "unevaluatedProperties": False},
    ])  # fmt: skip


def document(dice):
    """A schema with the definitions that its parts refer to."""
    schema = {}
    while not schema:
        schema = {"allOf": [made]} if isinstance(made := part(dice, 2), bool) else made
    anything_but_itself = {"x": {} if (made := small(dice)) == {"$ref": "#/$defs/x"} else made}
    chained = {"type": "object", "properties": {"a": {"$ref": "#/$defs/y"}}, "additionalProperties": small(dice)}
    return schema | {"$defs": {**anything_but_itself, "y": chained, "z": recursive(dice)}}


def part(dice, depth):
    """A schema of a few keywords."""
    if dice.random() < 0.06:
        return dice.choice([True, False, {}])
    schema = {}
    for _ in range(dice.choice([1, 1, 2, 2, 3])):
        schema |= dice.choice([_values, _values, _arrays, _objects, _objects, _combined])(
            dice, lambda: part(dice, depth - 1) if depth else small(dice)
        )
    return schema


def _values(dice, _):
    return dice.choice([
        {"type": dice.choice(TYPES)},
        {"type": dice.choice(TYPES)},
        {"const": value(dice, 1)},
        {"enum": [value(dice, 1) for _ in range(dice.randint(1, 4))]},
        {dice.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): dice.randint(-1, 4)},
        {"multipleOf": dice.randint(1, 3)},
        {dice.choice(["minLength", "maxLength"]): dice.randint(0, 3)},
        {"pattern": dice.choice(PATTERNS)},
        {"$ref": dice.choice(["#/$defs/x", "#/$defs/y", "#/$defs/z"])},
    ])  # fmt: skip


def _arrays(dice, inner):
    return dice.choice([
        lambda: {"items": inner()},
        lambda: {"prefixItems": [inner() for _ in range(dice.randint(1, 2))]},
        lambda: {"contains": inner()},
        lambda: {"contains": inner(), "minContains": dice.randint(0, 2), "maxContains": dice.randint(0, 2)},
        lambda: {dice.choice(["minItems", "maxItems"]): dice.randint(0, 3)},
        lambda: {"unevaluatedItems": dice.choice([False, inner()])},
        lambda: {"uniqueItems": True, "items": {"enum": [value(dice, 0) for _ in range(3)]}},
    ])()  # fmt: skip


def _objects(dice, inner):
    return dice.choice([
        lambda: {"properties": {key: inner() for key in dice.sample(KEYS, dice.randint(1, 3))}},
        lambda: {"properties": {key: inner() for key in dice.sample(KEYS, dice.randint(1, 3))}},
        lambda: {"required": dice.sample(KEYS, dice.randint(1, 2))},
        lambda: {"additionalProperties": dice.choice([False, inner()])},
        lambda: {"patternProperties": {dice.choice(PATTERNS): inner() for _ in range(2)}},
        lambda: {"propertyNames": {"pattern": dice.choice(PATTERNS)}},
        lambda: {"propertyNames": dice.choice([{"enum": ["a", "b"]}, {"maxLength": 1}])},
        lambda: {dice.choice(["minProperties", "maxProperties", "maxProperties"]): dice.randint(0, 2)},
        lambda: {"dependentRequired": {dice.choice(KEYS): dice.sample(KEYS, 1)}},
        lambda: {"dependentSchemas": {dice.choice(KEYS): inner()}},
        lambda: {"unevaluatedProperties": dice.choice([False, inner()])},
    ])()  # fmt: skip


def _combined(dice, inner):
    return dice.choice([
        lambda: {dice.choice(["anyOf", "allOf", "oneOf"]): [inner() for _ in range(dice.randint(1, 3))]},
        lambda: {"not": inner()},
        lambda: {"if": inner(), "then": inner()},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
    ])()  # fmt: skip


class Walk:
    """Random texts of a language that soon come to an end."""

    def __init__(self, language, dice):
        self._rules = language.rules
        self._dice = dice
        self._far = dict.fromkeys(language.rules, FAR)  # steps to the nearest end
        self._machines = {}
        changed = True
        while changed:
            found = {name: self._steps(rule) for name, rule in language.rules.items()}
            changed, self._far = found != self._far, found

    def text(self, expression, budget=6):
        match expression:
            case Text(text):
                return text
            case RuleCall(name):
                return self.text(self._rules[name], budget - 1)
            case Chain(items):
                return "".join(self.text(item, budget) for item in items)
            case Choice(items):
                return self.text(self._dice.choice(items) if budget > 0 else min(items, key=self._steps), budget)
            case Repeat(item, least, most):
                more = self._dice.randint(0, 2) if budget > 0 else 0
                count = least + more if most is None else min(least + more, most)
                return "".join(self.text(item, budget - 1) for _ in range(count))
            case Terminal(item):
                return self._word(item)
        raise TypeError(f"neither a rule nor a terminal: {expression!r}")

    def _steps(self, expression):
        match expression:
            case RuleCall(name):
                return min(FAR, self._far[name] + 1)
            case Chain(items):
                return min(FAR, sum(map(self._steps, items)))
            case Choice(items):
                return min(map(self._steps, items), default=FAR)
            case Repeat(item, least, _):
                return min(FAR, least * self._steps(item)) if least else 0
        return 1

    def _word(self, expression):
        machine, far = self._machines.setdefault(id(expression), None) or self._made(expression)
        word, state = "", 0
        while not machine.accepting[state] or (machine.moves[state] and self._dice.random() < 0.7):
            moves = machine.moves[state]
            if len(word) > 8:
                moves = [move for move in moves if far[move[2]] < far[state]]
                if not moves:
                    break
            first, last, state = self._dice.choice(moves)
            likely = [char for char in 'ab"0123' if first <= ord(char) <= last]
            word += self._dice.choice(likely) if likely else chr(self._dice.randint(first, last))
        return word

    def _made(self, expression):
        machine = regular.automaton(expression)
        far = [0 if accepts else FAR for accepts in machine.accepting]
        for _ in far:
            far = [
                min([steps, *(far[target] + 1 for _, _, target in moves)])
                for steps, moves in zip(far, machine.moves, strict=True)
            ]
        self._machines[id(expression)] = machine, far
        return machine, far
