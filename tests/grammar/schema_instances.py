"""Candidates for instances of a schema, drawn at random: most are valid, some nearly. A validator must tell which."""

from __future__ import annotations

import copy
import json
import re
from urllib.parse import unquote

FORMATS = {
    "date": "2024-02-29",
    "time": "10:20:30Z",
    "date-time": "2024-02-29T10:20:30Z",
    "duration": "P1DT2H",
    "email": "jo@example.org",
    "hostname": "www.example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/a?b=c#d",
    "uri-reference": "/a/b",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "json-pointer": "/a/b",
    "regex": "^a+$",
}
WORDS = ("", "a", "abc", "Some text", "1.0.0", "x-a", "aws", "/a/b", "A_1", "0", "https://example.org", "#ff0000", "é")
MAX_DEPTH = 7


class Instances:
    """Draws from one schema, within which "$ref" is followed."""

    def __init__(self, schema, rng):
        self._root = schema
        self._rng = rng

    def draw(self):
        return self._value(self._root, 0)

    def changed(self, value):
        """A copy with one thing changed, mostly for the worse."""
        value = copy.deepcopy(value)
        places = list(self._places(value))
        if not places:
            return self._rng.choice((None, 1, "a", [], {}, True))
        holder, key = self._rng.choice(places)
        if isinstance(holder, dict) and self._rng.random() < 0.4:
            del holder[key]
        else:
            holder[key] = self._other(holder[key])
        return value

    def _places(self, value):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            yield value, key
            yield from self._places(item)

    def _other(self, value):
        if isinstance(value, bool) or value is None:
            return self._rng.choice((0, "true", []))
        if isinstance(value, (int, float)):
            return self._rng.choice((-1, 10**9, value + 0.5, str(value), None))
        if isinstance(value, str):
            return self._rng.choice((value + "?", "", value * 50, 7, None))
        return self._rng.choice((None, 1, "a", [value] if isinstance(value, list) else []))

    def _value(self, schema, depth):
        if not isinstance(schema, dict):
            return self._rng.choice((None, 1, "a"))
        for keyword in ("const", "enum", "examples", "default"):
            if keyword in schema and (keyword in ("const", "enum") or self._rng.random() < 0.3):
                values = [schema[keyword]] if keyword in ("const", "default") else schema[keyword]
                if isinstance(values, list) and values:
                    return copy.deepcopy(self._rng.choice(values))
        if "$ref" in schema and depth < 3 * MAX_DEPTH:
            return self._value(self._target(schema["$ref"]), depth + 1)
        return self._combined(schema, depth)

    def _combined(self, schema, depth):
        """One branch of each list of branches, put together where they are objects."""
        parts = list(schema.get("allOf", ())) if isinstance(schema.get("allOf"), list) else []
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword] and depth < 3 * MAX_DEPTH:
                parts.append(self._rng.choice(schema[keyword]))
        own = self._own(schema, depth) if {"type", "properties", "items", "pattern"} & schema.keys() else None
        for part in parts if depth < 3 * MAX_DEPTH else ():
            value = self._value(part, depth + 1) if isinstance(part, dict) else None
            if isinstance(own, dict) and isinstance(value, dict):
                own |= {key: item for key, item in value.items() if key not in own}
            elif own is None:
                own = value
        return own

    def _own(self, schema, depth):
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self._rng.choice(kind) if kind else None
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("number", "integer"):
            return self._number(schema, kind)
        return {"null": None, "boolean": self._rng.random() < 0.5}.get(kind, self._string(schema))

    def _object(self, schema, depth):
        required = schema.get("required", ())
        required = required if isinstance(required, list) else ()
        properties = schema.get("properties", {})
        share = 0.5 if depth < 3 else 0.1
        value = {}
        for key, inside in properties.items():
            if key in required or (depth < MAX_DEPTH and self._rng.random() < share):
                value[key] = self._value(inside, depth + 1)
        for key in required:
            if key not in value:
                value[key] = self._value(schema.get("additionalProperties", True), depth + 1)
        more = schema.get("additionalProperties")
        if isinstance(more, dict) and depth < MAX_DEPTH and self._rng.random() < 0.6:
            value[self._rng.choice(WORDS[1:])] = self._value(more, depth + 1)
        for pattern, inside in schema.get("patternProperties", {}).items() if depth < MAX_DEPTH else ():
            names = [word for word in WORDS if _found(pattern, word)]
            if names and self._rng.random() < 0.6:
                value.setdefault(self._rng.choice(names), self._value(inside, depth + 1))
        return value

    def _array(self, schema, depth):
        least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
        count = min(max(least, self._rng.randint(0, 2) if depth < MAX_DEPTH else 0), max(most, least), 30)
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        return [self._value(first[i] if i < len(first) else rest, depth + 1) for i in range(count)]

    def _number(self, schema, kind):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low))
        low, high = (0 if isinstance(end, bool) else end for end in (low, high))
        value = self._rng.choice((low, low + 1, high, (low + high) // 2))
        step = schema.get("multipleOf")
        if step:
            value = value // step * step
        return int(value) if kind == "integer" or value == int(value) else value

    def _string(self, schema):
        least, most = schema.get("minLength", 0), schema.get("maxLength", 10**6)
        text = FORMATS.get(schema.get("format"))
        if text is None and isinstance(schema.get("pattern"), str):
            text = next((word for word in self._rng.sample(WORDS, len(WORDS)) if _found(schema["pattern"], word)), "a")
        elif text is None:
            text = self._rng.choice(WORDS)
        return text[:most] + "a" * (min(least, 5000) - len(text))

    def _target(self, reference):
        place = self._root
        for part in filter(None, unquote(reference.partition("#")[2]).split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                place = place[int(part) if isinstance(place, list) else part]
            except (LookupError, ValueError, TypeError):
                return True
        return place


def _found(pattern, word):
    try:
        return re.search(pattern, word) is not None
    except re.error:
        return False


def in_size(value, most=2_000):
    return len(json.dumps(value)) <= most
