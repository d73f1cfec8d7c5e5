"""What compiling a schema takes, counted: the work of combining alternatives is bounded, and nothing is done twice."""

from __future__ import annotations

import json
from collections import Counter

from real_schemas import corpus

from tureen.grammar.schema import objects, strings, unions
from tureen.grammar.schema.language import json_schema


def test_alternatives_that_are_hardly_told_apart_take_bounded_work_and_are_told(monkeypatch):
    # twenty objects, each with a name that it need not have: 190,000 shapes, and then it was too large all the same
    joined = 0

    def counted(shapes):
        nonlocal joined
        for shape in shapes:
            joined += 1
            yield shape

    join = unions.Unions.join
    monkeypatch.setattr(unions.Unions, "join", lambda self, shapes: join(self, counted(shapes)))
    language = json_schema(corpus()["angular-cli/package_lib_config_schema.json"])
    assert ("oneOf", "/projects/*/architect/*") in [(item.keyword, item.place) for item in language.unenforced]
    assert joined < 40_000


def test_the_same_unions_are_intersected_once(monkeypatch):
    # many branches of "oneOf" that refer to the same definitions
    calls = Counter()
    meet = objects.meet

    def counted(algebra, first, second):
        calls[id(first), id(second)] += 1
        shapes.append((first, second))  # so that no other one gets their ids
        return meet(algebra, first, second)

    shapes = []
    monkeypatch.setattr(objects, "meet", counted)
    json_schema(corpus()["asyncapi-specs/package_schemas_3.1.0-without-_id.json"])
    assert calls.total() < 1.2 * len(calls)


def test_a_format_beside_several_patterns_is_encoded_once(monkeypatch):
    num_parts = 0
    encoded = strings._encoded

    def counted(node, depth):
        nonlocal num_parts
        num_parts += 1
        return encoded(node, depth)

    monkeypatch.setattr(strings, "_encoded", counted)
    for pattern in ("^a", "^b", "^c"):
        before = num_parts
        json_schema(json.dumps({"type": "string", "format": "regex", "pattern": pattern}))
    assert num_parts - before < 100
