"""Guards against control tokens in clients' messages: only the chat template writes them; text that spells one is
encoded as text.

In a template's own literals each control token is replaced by an alias, a few private-use characters that clients
cannot guess. The tokenizer of renderings knows the aliases and not the texts of the tokens. So it does not matter
where clients put a token's text, or how a template cuts, joins, trims or replaces it: it stays text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from tureen.errors import InvalidRequest, echo
from tureen.text.messages import ROLES
from tureen.text.tokenizer import Tokenizer

CONTROL_FORM: Final = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
"""Tokens of this form are control tokens even when the tokenizer does not mark them as special."""
FIRST_INDEX: Final = 0xF0000  # an alias is the secret and a character from here on; all are private-use
ROLE_INDEX, END_INDEX = 0xFFFF0, 0xFFFF1
NO_MATCH: Final = "(?!)"
SEARCHES: Final = re.compile(r"(starts|ends)with|count|r?(find|index|partition|split)|[lr]?strip|remove(prefix|suffix)")
"""Methods of strings that search for their arguments: these literals stay texts, not aliases."""


class Encoded(NamedTuple):
    """An encoded rendering."""

    token_ids: list[int]
    num_neutralised: int  # control tokens that clients' texts spell and that were encoded as text


class ControlTokens:
    """The control tokens of one tokenizer and their aliases, and the encoder that knows them. Thread-safe.

    `placeholders`: text that stands for a picture or a video -> the id to encode it as. `allow_spelled`: text that
    spells a special token is that token, whoever wrote it; placeholders remain the template's.
    """

    def __init__(
        self, tokenizer: Tokenizer, placeholders: Mapping[str, int] | None = None, *, allow_spelled: bool = False
    ) -> None:
        placeholders = placeholders or {}
        added = {token.content: (token_id, token) for token_id, token in tokenizer.added_tokens.items()}
        ends = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
        control = [
            text
            for text, (token_id, token) in added.items()
            if (token.special or token_id in ends or CONTROL_FORM.fullmatch(text)) and not text.isspace()
        ]
        texts = list(dict.fromkeys([*control, *placeholders]))
        self._secret = "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(6))
        self._texts = {chr(FIRST_INDEX + index): text for index, text in enumerate(texts)}
        self._aliases = {text: self._secret + index for index, text in self._texts.items()}
        self._in_text = _any_of(texts)
        self._in_rendering = re.compile(self._secret + "(.)")
        self.end_mark = self._secret + chr(END_INDEX)
        self.role_mark = self._secret + chr(ROLE_INDEX)
        spelled = {
            text.replace(role, self.role_mark + role, 1): text for text in texts for role in ROLES if role in text
        }
        self._with_roles = _any_of(spelled)
        self._spelled = spelled
        self._scanner = _scanner([text for text in texts if not allow_spelled or text in placeholders])
        self._encoder, self._ids = _encoder(tokenizer, self._aliases, placeholders, allow_spelled=allow_spelled)
        self._refused = {added[text][0] for text in control} - _unknown(tokenizer) if not allow_spelled else set()

    def alias(self, text: str) -> str:
        """Replaces control tokens in a text of the template by their aliases."""
        return self._in_text.sub(lambda match: self._aliases[match.group()], text)

    def plain(self, rendering: str) -> str:
        """Returns a rendering as a person would read it: aliases become their tokens' texts."""
        return self._in_rendering.sub(lambda match: self._texts.get(match.group(1), ""), rendering)

    def join_roles(self, rendering: str) -> str:
        """Replaces control tokens that the template built around a role by aliases, and drops the marks of other
        roles."""
        joined = self._with_roles.sub(lambda match: self._aliases[self._spelled[match.group()]], rendering)
        return joined.replace(self.role_mark, "")

    def count_spelled(self, rendering: str) -> int:
        """Counts control tokens that a rendering spells as text."""
        ids = self._scanner.encode_batch_fast([rendering], add_special_tokens=False)[0].ids
        return sum(token_id > 0 for token_id in ids)

    def encode(self, rendering: str) -> Encoded:
        """Encodes a rendering, without adding special tokens. Releases the GIL. Raises InvalidRequest, without a
        field, for lone surrogates, and for control tokens that this tokenizer cannot encode as text."""
        try:
            raw = self._encoder.encode_batch_fast([rendering], add_special_tokens=False)[0].ids
            count = self.count_spelled(rendering)
        except TypeError:  # tokenizers' error for a string that has no UTF-8
            raise InvalidRequest("text has a lone surrogate; it must be valid Unicode") from None
        for token_id in raw:
            if token_id in self._refused and token_id not in self._ids:
                text = echo(self._encoder.id_to_token(token_id))
                raise InvalidRequest(f"this model's tokenizer cannot encode {text} as plain text; leave it out")
        return Encoded([self._ids.get(token_id, token_id) for token_id in raw], count)

    def mark_literals(self, tree: nodes.Template) -> nodes.Node:
        """Replaces control tokens by aliases in those literals of a parsed template that it may write, not in those
        that it searches for or compares with."""
        node: nodes.Node = _Literals(self.alias).visit(tree)
        return node


class _Literals(NodeTransformer):
    """Applies `alias` to the literals that a template may write."""

    def __init__(self, alias: Callable[[str], str]) -> None:
        self._alias = alias

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        node.data = self._alias(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, str):
            node.value = self._alias(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        method = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
        return self._visit_but(node, 99 if SEARCHES.fullmatch(method) else 1 if method == "replace" else 0)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        searches = {"replace": 1, "trim": 1, "select": 99, "reject": 99, "selectattr": 99, "rejectattr": 99}
        return self._visit_but(node, searches.get(node.name, 0))

    def _visit_but(self, node: nodes.Call | nodes.Filter, num_searched: int) -> nodes.Node:
        """Visits a call except for its first arguments, which are searched for."""
        kept, node.args = node.args[:num_searched], node.args[num_searched:]
        self.generic_visit(node)
        node.args = kept + node.args
        return node


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or NO_MATCH)


def _scanner(texts: list[str]) -> Backend:
    """Makes a tokenizer that encodes each of `texts` as an id above 0, and everything between as 0."""
    backend = Backend(models.WordLevel({"": 0}, unk_token=""))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return backend


def _encoder(
    tokenizer: Tokenizer, aliases: Mapping[str, str], placeholders: Mapping[str, int], *, allow_spelled: bool
) -> tuple[Backend, dict[int, int]]:
    """Makes a tokenizer over the same vocabulary that knows aliases in place of control tokens. Returns it with its own
    ids -> the model's."""
    original = tokenizer.backend
    backend = Backend(original.model)  # shared, not copied
    if original.normalizer is not None:
        backend.normalizer = original.normalizer
    if original.pre_tokenizer is not None:
        backend.pre_tokenizer = original.pre_tokenizer
    entries: list[tuple[str, int, AddedToken]] = []
    for token_id, token in tokenizer.added_tokens.items():
        alias = aliases.get(token.content)
        if alias is None or (allow_spelled and token.content not in placeholders):
            entries.append((token.content, token_id, token))
        if alias is not None:
            entries.append((alias, placeholders.get(token.content, token_id), token))
    known = {token.content for token in tokenizer.added_tokens.values()}
    plain = AddedToken("", normalized=False)
    entries += [(aliases[text], token_id, plain) for text, token_id in placeholders.items() if text not in known]
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    backend.add_special_tokens(
        [AddedToken(text, **{flag: getattr(token, flag) for flag in flags}) for text, _, token in entries]
    )
    ids = {backend.token_to_id(text): token_id for text, token_id, _ in entries}
    return backend, {own: token_id for own, token_id in ids.items() if own is not None}


def _unknown(tokenizer: Tokenizer) -> set[int]:
    """Returns the unknown token, in a set that is empty when there is none."""
    text = getattr(tokenizer.backend.model, "unk_token", None)
    token_id = tokenizer.token_id(text) if isinstance(text, str) else None
    return set() if token_id is None else {token_id}
