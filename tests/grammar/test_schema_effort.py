"""What reading a schema takes, counted: the work of combining alternatives is bounded."""

from __future__ import annotations

from test_schema_corpus import corpus

from tureen.grammar.schema import unions
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
