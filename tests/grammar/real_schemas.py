"""Real JSON schemas against their ledger: what is refused, and of what values a grammar is wrong.

The schemas are those of `schema_corpus.toml`. Values are drawn for each, jsonschema_rs tells which are valid, and a
value is accepted where some order of its keys may be written by the compiled grammar. `schema_corpus_ledger.json` names
what is not right; it may only get shorter. test_real_schemas.py looks at every 256th schema, tests/ledgers/grammar at
every eighth; `python tests/grammar/real_schemas.py` checks all, and rewrites the ledger unless a result is worse.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tarfile
import time
from functools import cache
from pathlib import Path

import jsonschema_rs
import numpy as np
from schema_instances import Instances, in_size

from tureen.grammar import GrammarError, LanguageCompiler, Vocabulary
from tureen.grammar.schema.language import json_schema
from tureen.kernels.cpu import native

HERE = Path(__file__).parent
LEDGER = HERE / "schema_corpus_ledger.json"
CORPUS = HERE / "schema_corpus.tar.xz"
DRAWN = 6
"""Values drawn for a schema; each is looked at as it is, and with one thing changed."""
MAX_TRIES = 3_000
"""Keys tried in the writing of one value, in all orders together."""

WRONG = ("over-constrained", "under-constrained")


@cache
def corpus():
    """Name to the schema's text."""
    with tarfile.open(CORPUS) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


@cache
def compiler():
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)), (256,), 257)
    return LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require())


class Writing:
    """Writes one value by a grammar, its keys in any order that the grammar has."""

    def __init__(self, compiled):
        self._grammar = compiled.start()
        self._count = 0
        self._tries = 0

    def can_write(self, value):
        """Whether the whole text may be the value; None where that took too much to find out."""
        try:
            return self._value(value) and self._grammar.is_accepting
        except (TimeoutError, GrammarError):
            return None

    def _text(self, text):
        start = self._count
        for byte in text.encode():
            if not self._grammar.accept(byte):
                self._back(start)
                return False
            self._count += 1
        return True

    def _back(self, count):
        if self._count > count:
            self._grammar.rollback(self._count - count)
            self._count = count

    def _value(self, value):
        start = self._count
        if isinstance(value, list):
            is_written = self._text("[") and all(
                self._text(", " if index else "") and self._value(item) for index, item in enumerate(value)
            )
            is_written = is_written and self._text("]")
        elif isinstance(value, dict):
            is_written = self._text("{") and self._members(value, list(value))
        elif isinstance(value, float) and value.is_integer():  # an integer too, which is written without a fraction
            is_written = self._text(str(int(value))) or self._text(str(value))
        else:
            is_written = self._text(json.dumps(value, ensure_ascii=False))
        if not is_written:
            self._back(start)
        return is_written

    def _members(self, value, keys):
        if not keys:
            return self._text("}")
        for key in keys:
            self._tries += 1
            if self._tries > MAX_TRIES:
                raise TimeoutError
            start = self._count
            comma = "" if len(keys) == len(value) else ", "
            is_written = self._text(f"{comma}{json.dumps(key, ensure_ascii=False)}: ") and self._value(value[key])
            if is_written and self._members(value, [other for other in keys if other != key]):
                return True
            self._back(start)
        return False


def validators(text):
    """Two validators: one that looks at formats too, and one that does not. None for what is no schema to it."""
    schema = json.loads(text)
    draft = schema.get("$schema", "")
    names = {
        "draft-04": jsonschema_rs.Draft4Validator,
        "draft-06": jsonschema_rs.Draft6Validator,
        "draft/2019-09": jsonschema_rs.Draft201909Validator,
        "draft/2020-12": jsonschema_rs.Draft202012Validator,
    }
    is_old = any(f'"{keyword}":' in text for keyword in ("definitions", "dependencies", "additionalItems"))
    class_ = next((known for name, known in names.items() if name in draft), None)
    if class_ is None:
        class_ = jsonschema_rs.Draft7Validator if is_old or draft else jsonschema_rs.Draft202012Validator
    schema.pop("$schema", None)
    allow_null(schema)
    try:
        return [class_(schema, validate_formats=looks) for looks in (True, False)]
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
        return None


def allow_null(schema):
    """OpenAPI's "nullable", which this validator does not know."""
    for inside in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        allow_null(inside)
    if isinstance(schema, dict) and schema.get("nullable") is True and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
        if isinstance(schema.get("enum"), list):
            schema["enum"].append(None)


@cache
def outcome(name):
    """What became of a schema: {"refused": …}, or how many valid values could be written, and what is wrong."""
    text = corpus()[name]
    start_s = time.process_time()
    try:
        language = json_schema(text)
        compiled = compiler().load(compiler().translate(language))
        compiled.start().fill_mask(np.zeros(9, dtype=np.uint32))
    except GrammarError as error:
        return {"refused": str(error)[:160]}
    result = {"ms": (time.process_time() - start_s) * 1000, "valid": 0, "invalid": 0}
    judges = validators(text)
    if judges is not None:
        judge(name, text, compiled, language, judges, result)
    return result


def judge(name, text, compiled, language, judges, result):
    wider = None
    instances = Instances(json.loads(text), random.Random(name))
    has_formats = '"format":' in text  # of which the validator knows fewer than are enforced
    for index in range(2 * DRAWN):
        value = instances.draw()
        if index % 2:
            value = instances.changed(value)
        if not in_size(value):
            continue
        if judges[0].is_valid(value):
            if index % 2 and has_formats:
                continue
            result["valid"] += 1
            if Writing(compiled).can_write(value) is False:
                if wider is None:  # with keys that the schema does not speak of
                    with_all = json_schema(text, leaves_out=False)
                    wider = compiler().load(compiler().translate(with_all))
                kind = "over-constrained" if Writing(wider).can_write(value) is False else "keys left out"
                result.setdefault(kind, []).append(value)
        elif not judges[1].is_valid(value):
            result["invalid"] += 1
            if Writing(compiled).can_write(value):
                kind = "for the final check" if language.unenforced else "under-constrained"
                result.setdefault(kind, []).append(value)


def told(name):
    """What the ledger says of a schema that is not right in everything."""
    found = outcome(name)
    if "refused" in found:
        return {"refused": found["refused"]}
    return {kind: len(found[kind]) for kind in (*WRONG, "keys left out", "for the final check") if kind in found}


def ledger():
    return json.loads(LEDGER.read_text(encoding="utf-8"))


def summary(outcomes):
    compiled = [found for found in outcomes.values() if "refused" not in found]
    times = sorted(found["ms"] for found in compiled)
    return {
        "schemas": len(outcomes),
        "compiled": len(compiled),
        **{kind: sum(kind in found for found in compiled) for kind in (*WRONG, "keys left out", "for the final check")},
        "valid values": sum(found["valid"] for found in compiled),
        "invalid values": sum(found["invalid"] for found in compiled),
        "compile CPU ms": {f"p{share}": round(times[len(times) * share // 100], 1) for share in (50, 90, 99)},
    }


def main():
    outcomes = {}
    for name in corpus():
        gc.disable()
        outcomes[name] = outcome(name)
        gc.enable()
        gc.collect()
    before = ledger() if LEDGER.exists() else None
    after = {"sums": summary(outcomes), "not right": {name: told(name) for name in outcomes if told(name)}}
    after["CPU ms, from 10"] = {
        name: round(found["ms"]) for name, found in outcomes.items() if found.get("ms", 0) >= 10
    }
    worse = [
        kind
        for kind in ("compiled", *WRONG)
        if before is not None and (before["sums"][kind] - after["sums"][kind]) * (1 if kind == "compiled" else -1) > 0
    ]
    print(json.dumps(after["sums"], indent=1))
    for name, what in after["not right"].items():
        if what.keys() & {"refused", *WRONG}:
            example = next((outcomes[name][kind][0] for kind in WRONG if kind in outcomes[name]), "")
            print(name, what, json.dumps(example)[:300])
    if worse:
        print("worse:", *worse)
        return 1
    LEDGER.write_text(json.dumps(after, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
