"""Names beside keywords in JSON schemas: annotations of many vocabularies, and mistakes in typing a keyword."""

from __future__ import annotations

from functools import lru_cache

ANNOTATIONS = frozenset({
    # JSON Schema
    "$schema", "$id", "id", "$comment", "$defs", "definitions", "$vocabulary", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
    # OpenAPI
    "example", "nullable", "discriminator", "xml", "externalDocs", "collectionFormat", "allowEmptyValue",
    # editors, generators of forms, of code and of documents
    "enumNames", "enumDescriptions", "enumTitles", "markdownDescription", "markdownEnumDescriptions", "errorMessage",
    "patternErrorMessage", "patternMessage", "deprecationMessage", "defaultSnippets", "doNotSuggest", "optional",
    "propertyOrder", "order", "options", "readonly", "tsType", "tsEnumNames", "javaType", "existingJavaType",
    "formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum",
})  # fmt: skip
"""Names that are near to a keyword, or could be, and are none."""
LEAST_LETTERS = 5


def is_annotation(name: str) -> bool:
    """Returns whether a name is known to be no keyword, or is one of somebody's own vocabulary."""
    return name in ANNOTATIONS or not name.replace("_", "").isalpha() or name.startswith(("x_", "_"))


def nearest(name: str, keywords: tuple[str, ...]) -> str:
    """Returns the keyword that a name is a mistake for; "" where none is near.

    Letters may be missing, too many, wrong or exchanged: one of six letters, two of ten, three of sixteen; and from
    five on they may be small or large.
    """
    letters = name.replace("_", "").lower()
    different = frozenset(letters)
    near = []
    for keyword, small, their_letters, most in _of_length(len(letters), keywords):
        if len(different ^ their_letters) <= 2 * most:  # a change makes two letters different, at most
            num = num_changes(letters, small, most)
            if num <= most:
                near.append((num, keyword))
    if near and letters.endswith(min(near)[1].lower()) and min(near)[0] > 1:
        return ""  # with a prefix of somebody's own: "tsAdditionalProperties"
    return min(near, default=(0, ""))[1]


@lru_cache(256)
def _of_length(length: int, keywords: tuple[str, ...]) -> list[tuple[str, str, frozenset[str], int]]:
    """Returns the keywords that a mistake of `length` letters can stand for: each as it is, in small letters, these
    letters, and how many changes a mistake may have."""
    near = []
    for keyword in keywords:
        most = sum(len(keyword) >= size for size in (6, 10, 16))  # "cost" is no "const", "allow" no "allOf"
        if len(keyword) >= LEAST_LETTERS and abs(length - len(keyword)) <= most:
            near.append((keyword, keyword.lower(), frozenset(keyword.lower()), most))
    return near


@lru_cache(4096)
def num_changes(text: str, other: str, most: int) -> int:
    """Returns how many letters must be put in, taken out, changed, or exchanged with their neighbour; more than `most`
    where it is more."""
    if abs(len(text) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(text, 1):
        older, before, row = before, row, [i]
        for j, wish in enumerate(other, 1):
            num = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wish))
            if i > 1 and j > 1 and letter == other[j - 2] and text[i - 2] == wish:
                num = min(num, older[j - 2] + 1)
            row.append(num)
    return row[-1]
