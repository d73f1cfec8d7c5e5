"""Writes the pages of docs/ that derive from the code: parameters, settings, models, clients, flags of peers; the
pictures; and the schema of the Helm chart's values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import inspect

from tureen.config import ENV_PREFIX, Config
from tureen.contract.params import ALIASES, INT64_MAX, INT64_MIN, SamplingParams
from tureen.http.dialect import dialects

sys.path.insert(0, str(Path(__file__).parent))
from chart_schema import CHART, chart_schema
from clients_page import clients_page
from fit_page import fit_page
from models_page import models_pages
from peers_page import peers_pages
from pictures import pictures

DOCS = Path(__file__).resolve().parent.parent / "docs"
SAMPLING = SamplingParams.__struct_fields__
BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
GENERATED = "<!-- Written by tools/docs.py (`make docs`). Change {source}, not this page. -->"
NAMES: dict[type, str] = {
    inspect.AnyType: "value",
    inspect.StructType: "object",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "boolean",
    inspect.StrType: "string",
    inspect.NoneType: "null",
}


def main() -> None:
    for name, page in pages().items():
        (DOCS / name).write_text(page, encoding="utf-8")
        print(f"docs/{name}")
    (DOCS / "images").mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (DOCS / "images" / name).write_text(picture, encoding="utf-8")
        print(f"docs/images/{name}")
    (CHART / "values.schema.json").write_text(chart_schema(), encoding="utf-8")
    print("deploy/helm/tureen/values.schema.json")


def pages() -> dict[str, str]:
    return {
        "parameters.md": _parameters_page(),
        "settings.md": _settings_page(),
        **models_pages(GENERATED.format(source="the files of tureen/models")),
        "which-model.md": fit_page(GENERATED.format(source="tools/fit_page.py")),
        "clients.md": clients_page(GENERATED.format(source="tests/clients")),
        **peers_pages(),
    }


def _parameters_page() -> str:
    aliases = "; ".join(f"`{alias}` is another name of `{name}`" for alias, name in ALIASES.items())
    lines = [
        "# Parameters",
        "",
        GENERATED.format(source="tureen/contract/params.py and the bodies declared under tureen/dialects/"),
        "",
        "```",
        "curl http://127.0.0.1:30000/generate -H 'Content-Type: application/json' \\",
        """  -d '{"text": "Once upon a time", "sampling_params": {"temperature": 0.8, "top_p": 0.95}}'""",
        "```",
        "",
        "Every field that a request may have, API by API. `null` means the default. Numbers are finite, integers fit",
        "64 bits, booleans are not integers. Anything else is refused by name.",
        "",
        "## Sampling parameters",
        "",
        f"The fields of `sampling_params`; {aliases}. How they act together: [sampling](sampling.md).",
        "",
        *_field_table(SamplingParams),
    ]
    for section in (section for dialect in dialects() for section in dialect.sections):
        lines += ["", f"## {section.title}", "", section.text, "", *_field_table(section.struct)]
    return "\n".join([*lines, ""])


def _field_table(struct: type[msgspec.Struct]) -> list[str]:
    rows = [
        (
            f"`{field.encode_name}`",
            _type(field.type),
            "–" if field.required else f"`{_default(field)}`",
            _meta(struct, field.name).description or "",
        )
        for field in _fields(struct)
        if struct is SamplingParams or not issubclass(struct, SamplingParams) or field.name not in SAMPLING
    ]
    return _table(("field", "type", "default", "meaning"), rows)


def _settings_page() -> str:
    lines = [
        "# Settings",
        "",
        GENERATED.format(source="tureen/config.py"),
        "",
        "```",
        "tureen serve --context-length 4096                   # a flag",
        "TUREEN_CONTEXT_LENGTH=4096 tureen serve              # an environment variable",
        "echo 'context-length = 4096' > tureen.toml; tureen serve --config tureen.toml",
        "```",
        "",
        "Each setting is a flag of `tureen serve`, an environment variable and a key of the TOML file given with",
        "`--config`. The first of these that names a setting wins. In the file, a key is the flag without its dashes",
        "in front.",
    ]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for field in _fields(Config):
        meta = _meta(Config, field.name)
        extra = meta.extra or {}
        flags = [f"`--{field.name.replace('_', '-')}`", *([f"`{extra['alias']}`"] if extra["alias"] else [])]
        variable = f"`{ENV_PREFIX}{field.name.upper()}`"
        default = "" if field.default is None else f"`{_default(field)}`"
        row = (", ".join(flags), variable, _type(field.type), default, meta.description or "")
        groups.setdefault(extra["group"], []).append(row)
    for group, rows in groups.items():
        heading = ("flag", "variable", "type", "default", "meaning")
        lines += ["", f"## {group.capitalize()}", "", *_table(heading, rows)]
    return "\n".join([*lines, ""])


def _fields(struct: type) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(struct)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{struct} is not a struct")
    return info.fields


def _meta(struct: type[msgspec.Struct], name: str) -> msgspec.Meta:
    [kind] = [field.type for field in msgspec.structs.fields(struct) if field.name == name]
    metas: list[msgspec.Meta] = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    return next((meta for meta in metas if meta.description), metas[0])


def _default(field: inspect.Field) -> str:
    if isinstance(field.default, msgspec.Struct):
        return "{}"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _type(kind: inspect.Type) -> str:
    """A type in words, with its bounds."""
    if isinstance(kind, inspect.Metadata):
        batch = (kind.extra or {}).get("batch")
        return _type(kind.type) + (f" (a batch: at most {batch})" if batch else "")
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_type(part) for part in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        item = _type(kind.item_type)
        return (f"list of ({item})" if " or " in item or " of " in item else f"list of {item}s") + _most(kind)
    if isinstance(kind, inspect.DictType):
        return f"object of {_type(kind.key_type)}: {_type(kind.value_type)}{_most(kind)}"
    return " ".join([NAMES[type(kind)], *_bounds(kind)])


def _most(kind: inspect.ListType | inspect.VarTupleType | inspect.DictType) -> str:
    return "" if kind.max_length is None else f" (at most {kind.max_length})"


def _bounds(kind: inspect.Type) -> Iterator[str]:
    for name, sign in BOUNDS:
        bound = getattr(kind, name, None)
        if bound is not None and bound not in (INT64_MIN, INT64_MAX):
            yield f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}"


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [heading, tuple("---" for _ in heading), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]


if __name__ == "__main__":
    main()
