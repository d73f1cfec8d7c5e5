"""Random languages over a few characters: with intersections, complements, counts and rules."""

from __future__ import annotations

from backend_languages import chain, chars, choice, star

from tureen.grammar.expression import Both, Language, Not, RuleCall, Text


def random_language(source, *, has_rules):
    names = ["x", "y"] if has_rules else []
    rules = {name: choice(random_expression(source, 2, names), source.choice(["a", "b", ""])) for name in names}
    return Language(random_expression(source, 3, names), rules)


def random_expression(source, depth, rules=()):
    kind = source.choice(["text", "text", "chars", "chain", "chain", "choice", "repeat", "both", "not", "call"])
    if kind == "call" and rules and depth < 3:
        return chain("(", RuleCall(source.choice(rules)), ")")
    if depth == 0 or kind in ("text", "chars"):
        size = source.randint(0, 2)
        return (
            chars(source.choice(["a", "b", "ab"])) if kind == "chars" else Text("".join(source.choices("ab(", k=size)))
        )
    if kind in ("both", "not", "call"):
        inside = random_expression(source, depth - 1)
        return Both(Not(inside) if kind == "not" else inside, star(chars("ab"), 0, source.choice([2, 4, None])))
    if kind == "repeat":
        least = source.randint(0, 2)
        return star(
            random_expression(source, depth - 1, rules), least, source.choice([None, least + source.randint(0, 2)])
        )
    items = [random_expression(source, depth - 1, rules) for _ in range(source.randint(1, 3))]
    return chain(*items) if kind == "chain" else choice(*items)
