"""The official meta-schemas of JSON Schema, drafts 4 to 2020-12 and their vocabularies, for "$ref" to them.

`meta_schemas.json` has what https://json-schema.org publishes, without annotations. Copyright the JSON Schema authors;
published under the BSD 3-clause licence or the Academic Free Licence 3.0, here under the former.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
SITE = "://json-schema.org/"


def official_uri(uri: str) -> str | None:
    """Returns the URI of a meta-schema as it is published, with http or https; None if `uri` is none of them."""
    scheme, site, name = uri.partition(SITE)
    if scheme not in ("http", "https") or not site:
        return None
    names = (f"http{SITE}{name}", f"https{SITE}{name}")
    return next((known for known in names if known in load()), None)


def official(uri: str) -> dict[str, Any]:
    """Returns a copy of the meta-schema that is published at this URI."""
    schema: dict[str, Any] = json.loads(load()[uri])
    return schema


def resources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each meta-schema by each URI that may mean it."""
    for uri in load():
        for scheme in ("http", "https"):
            yield scheme + SITE + uri.partition(SITE)[2], official(uri)


def is_dynamic(reference: str) -> bool:
    """Returns whether a reference may lead to a meta-schema with "$dynamicRef" or "$recursiveRef"."""
    return f"{SITE}draft/" in reference


@cache
def load() -> dict[str, str]:
    """Reads the file, once. Returns the JSON of each meta-schema by its URI."""
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return {uri: json.dumps(schema) for uri, schema in known.items()}
