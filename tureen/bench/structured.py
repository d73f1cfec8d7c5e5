"""The `json` workload: objects of five fields; measures whether they match their schema, and how many steps they
took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import jsonschema_rs
import msgspec

from tureen.bench.drive import FinishedRequest
from tureen.bench.report import Result, in_short, lay_out
from tureen.bench.workloads import BenchRequest, Dice

OUTPUT_LEN = 160  # more than the longest object takes in the layout with the fewest spaces

PERSON = {
    "name": {"type": "string", "minLength": 3, "maxLength": 32},
    "age": {"type": "integer", "minimum": 18, "maximum": 99},
    "role": {"enum": ["administrator", "editor", "moderator", "visitor"]},
    "is_active": {"type": "boolean"},
    "languages": {
        "type": "array",
        "items": {"enum": ["English", "French", "German", "Spanish"]},
        "minItems": 1,
        "maxItems": 3,
    },
}
ORDER = {
    "product": {"type": "string", "minLength": 3, "maxLength": 40},
    "quantity": {"type": "integer", "minimum": 1, "maximum": 500},
    "status": {"enum": ["ordered", "in delivery", "delivered", "returned"]},
    "is_gift": {"type": "boolean"},
    "addressee": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 24},
            "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
        "required": ["city", "postal_code"],
        "additionalProperties": False,
    },
}
TICKET = {
    "summary": {"type": "string", "minLength": 8, "maxLength": 60},
    "priority": {"type": "integer", "minimum": 1, "maximum": 5},
    "component": {"enum": ["login", "search", "billing", "mobile application"]},
    "is_reproducible": {"type": "boolean"},
    "affected_versions": {
        "type": "array",
        "items": {"enum": ["1.8", "1.9", "2.0", "2.1"]},
        "minItems": 1,
        "maxItems": 3,
    },
}
ASKED = (
    ("The profile of user {0} as a JSON object:\n", PERSON),
    ("Order {0} of our web shop, written as JSON:\n", ORDER),
    ("A customer reported problem {0}. The ticket in JSON:\n", TICKET),
)


def json_jobs(dice: Dice, count: int, *, are_new: bool = False) -> list[BenchRequest]:
    """Makes prompts with a number of their own, the schemas in turn; `are_new`: every schema is one of its own too."""
    jobs = []
    for index in range(count):
        serial = dice.random.randrange(10**5, 10**6)
        prompt, properties = ASKED[index % len(ASKED)]
        schema = _schema(properties, f"number {serial}" if are_new else None)
        jobs.append(BenchRequest(prompt.format(serial), OUTPUT_LEN, schema))
    return jobs


def plain_jobs(dice: Dice, count: int, output_len: int) -> list[BenchRequest]:
    """Makes the same kind of prompts without a schema, each answer exactly so long."""
    return [msgspec.structs.replace(job, schema=None, output_len=output_len) for job in json_jobs(dice, count)]


def share_valid(jobs: Sequence[BenchRequest], answers: Sequence[FinishedRequest]) -> float | None:
    """Returns the share of the answers to jobs with a schema that are JSON and match it; None where no job has one."""
    asked = [(job.schema, answer.text) for job, answer in zip(jobs, answers, strict=True) if job.schema is not None]
    if not asked:
        return None
    validators = {schema: jsonschema_rs.validator_for(schema) for schema, _ in asked}
    return round(sum(_matches(text, validators[schema]) for schema, text in asked) / len(asked), 4)


def _matches(text: str, validator: jsonschema_rs.Validator) -> bool:
    try:
        return validator.is_valid(json.loads(text))
    except ValueError:
        return False


HEADINGS = (
    "structured", "target", "req", "tokens", "decoded", "tokens/step", "req/s", "e2e p50", "p99", "valid", "plain/json"
)  # fmt: skip


def table(results: Iterable[Result]) -> str:
    """Formats one line a pass with a schema.

    `decoded` = tokens less those that were forced, so the steps of each sequence in all; `plain/json` = how many times
    as long as many tokens without a schema took.
    """
    by_pass = {(result.workload, result.target, result.round): result for result in results}
    lines = [
        _line(result, by_pass.get((f"{workload}-plain", target, number)))
        for (workload, target, number), result in by_pass.items()
        if result.valid is not None
    ]
    return lay_out([HEADINGS, *lines])


def _line(result: Result, plain: Result | None) -> tuple[str, ...]:
    decoded = result.output_tokens - (result.forced_tokens or 0)
    latency = result.e2e_ms
    return (
        result.workload,
        result.target,
        str(result.requests),
        str(result.output_tokens),
        str(decoded),
        in_short(result.output_tokens / decoded),
        in_short(result.request_s),
        in_short(latency.p50 if latency else None),
        in_short(latency.p99 if latency else None),
        f"{result.valid:.1%}",
        in_short(result.output_tok_s / plain.output_tok_s) if plain else "–",
    )


def _schema(properties: dict[str, Any], choice: str | None) -> str:
    """Returns a schema of these properties; `choice`: one more choice where the object has an enumeration."""
    if choice is not None:
        properties = {
            name: value | {"enum": [*value["enum"], choice]} if "enum" in value else value
            for name, value in properties.items()
        }
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )
