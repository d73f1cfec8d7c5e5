"""The types of the Model Context Protocol, as its Python SDK (mcp 2.3.0, MIT) declares them, are enforced wholly."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from random_schemas import Walk

from tureen.grammar.schema.language import json_schema

FILE = Path(__file__).resolve().parents[1] / "golden" / "mcp_schemas.json.xz"
SCHEMAS: dict[str, Any] = json.loads(lzma.decompress(FILE.read_bytes()))
NAMES = sorted(SCHEMAS)


def test_all_types_of_the_protocol_are_there():
    assert len(SCHEMAS) >= 45
    assert {"CallToolResult", "ListToolsResult", "Tool", "InitializeRequest", "JSONRPCRequest"} <= SCHEMAS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_type_is_compiled_with_nothing_left_out(name):
    assert json_schema(json.dumps(SCHEMAS[name]), strict=True).unenforced == ()


@pytest.mark.parametrize("name", NAMES[::5])
def test_what_the_language_has_is_valid(name):
    language = json_schema(json.dumps(SCHEMAS[name]))
    walk = Walk(language, random.Random(name))
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for _ in range(4):
        text = walk.text(language.start)
        assert validator.is_valid(json.loads(text)), text
