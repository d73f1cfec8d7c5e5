"""The interface of a compiled constraint: it computes the next token's mask and ends outputs within their limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""[ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i may come next."""

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]


MAX_GRAMMAR_BYTES = 256 << 10
MAX_SCHEMA_BYTES = 2 << 20
SCHEMAS = frozenset(("json_schema", "structural_tag"))
"""The kinds that contain JSON schemas."""


def max_bytes(kind: str) -> int:
    """Returns the most bytes of UTF-8 that a constraint of this kind may have."""
    return MAX_SCHEMA_BYTES if kind in SCHEMAS else MAX_GRAMMAR_BYTES


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A constraint as a client sent it."""

    kind: Kind
    text: str  # JSON for json_schema, structural_tag and choice (a list of strings)
    after: str = ""  # free text comes first, until this marker has occurred; "" = the constraint starts at once
    strict: bool = False  # what of its schemas cannot be enforced is refused, not left out
    unicode_classes: bool = False  # `\d`, `\w` and `\s` of Python's patterns know all scripts, not ASCII only


WARM_UP = GrammarSpec(
    "json_schema",
    '{"type": "object", "properties": {"a": {"enum": ["x", 1]}, "b": {"type": "boolean"}, "c": {"type": "null"}}, '
    '"required": ["a", "b"], "additionalProperties": false}',
)
"""A worker compiles this in advance, because its first compile is slow: it copies the pages it writes to."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens as bytes. Can be sent to another process."""

    tokens: tuple[bytes, ...]  # by id; b"" for what a constrained output never holds: special tokens, unused ids
    eos_token_ids: tuple[int, ...]  # allowed exactly where the output may end
    size: int  # of the model's logits, at least len(tokens); ids from len(tokens) on are never allowed
    specials: tuple[tuple[int, bytes], ...] = ()  # special tokens that may stand for their texts, where one says so

    def with_specials(self) -> Vocabulary:
        """Returns the vocabulary in which these special tokens are text."""
        tokens = list(self.tokens)
        for token_id, text in self.specials:
            tokens[token_id] = text
        return Vocabulary(tuple(tokens), self.eos_token_ids, self.size)


Encode = Callable[[str], list[int]]
"""Text to token ids as the model's own tokenizer does it, without special tokens. Thread-safe."""


class Ending(NamedTuple):
    """The masks that go with one under which a word may be continued or ended, but no new word begun.

    Only the model knows whether the word is complete: it is if the token that the model finds likeliest among those of
    `open` is not in the mask. Then `nearer` takes the mask's place.
    """

    open: Mask  # all tokens after which there is time to end
    nearer: Mask  # those that lead nearer to the end


class Nearness(NamedTuple):
    """Whether and how the limit restricts the next token."""

    is_near: bool  # tokens were taken from its mask because the end is near
    ending: Ending | None = None


class Zones(NamedTuple):
    """The numbers of spare tokens below which no further word, or no further sentence, begins."""

    words: int = 0
    sentences: int = 0


class Grammar(Protocol):
    """The place of one output in its language. Not thread-safe; a method that computes long releases the GIL.

    Each method raises GrammarError if following the language takes too much work or memory.
    """

    def fill_mask(self, mask: Mask) -> None:
        """Writes the next token's mask, all words. It has EOS exactly if the output may end here.

        If no token is allowed, the mask is all zero.
        """

    def accept(self, token_id: int) -> bool:
        """Appends one token. Returns False, and changes nothing, if the token is not allowed. Never called with EOS."""

    def rollback(self, num_tokens: int) -> None:
        """Goes back to where it was before the last `num_tokens` tokens were accepted."""

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, as the tokenizer would make them of the only text there can be.

        Only those whose place is certain: the last ones are left out where what follows could merge with them. Empty
        where there is a choice. Changes nothing; each can be accepted one after the other.
        """

    @property
    def is_accepting(self) -> bool:
        """Returns whether the output may end here."""

    @property
    def is_done(self) -> bool:
        """Returns whether the output can only end here: it is accepted and nothing can follow."""

    @property
    def is_free(self) -> bool:
        """Returns whether the output is in free text that may continue without end, and may also end here. The limit
        cuts such text."""

    @property
    def cost(self) -> int:
        """Returns the minimum number of tokens that complete the output, without EOS. Does not count what a guard
        requires, nor the rest of a character in free text that the limit cuts."""

    def restrict(self, mask: Mask, left: int, zones: Zones) -> Nearness:
        """Removes tokens from the mask after which the output cannot end within `left` tokens. Near the end, also
        removes those that begin another word or sentence."""

    def num_closing(self, token_ids: Sequence[int], left: int) -> int:
        """Returns how many of these tokens can be appended so that the output can still end within `left` tokens."""


class CompiledGrammar(Protocol):
    """A language ready for one vocabulary, shared by any number of outputs. Immutable."""

    ends: Mask
    """The tokens that end an output."""

    least: int | None
    """The minimum number of tokens of an output, without EOS; None if no completion is known."""

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory it takes."""

    @property
    def reserve(self) -> int:
        """Returns how many tokens a completion may need beyond `least` and `cost`, because of a guard."""

    def start(self) -> Grammar:
        """Returns a grammar at the beginning of an output."""


def packed(token_ids: Iterable[int] | NDArray[np.intp], size: int) -> Mask:
    """Returns a mask of [ceil(size / 32)] in which the bits of these tokens are 1."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[token_ids if isinstance(token_ids, np.ndarray) else list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
