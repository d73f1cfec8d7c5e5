"""The interface of a grammar backend: it compiles a language for one vocabulary, and says which tokens may come
next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.grammar.expression import Language

Mask = NDArray[np.uint32]
"""[ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i may come next."""

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]


MAX_GRAMMAR_BYTES = 256 << 10
MAX_SCHEMA_BYTES = 2 << 20
SCHEMAS = frozenset(("json_schema", "structural_tag"))
"""The kinds in which there are JSON schemas."""


def max_bytes(kind: str) -> int:
    """Returns the most bytes of UTF-8 that a constraint of this kind may have."""
    return MAX_SCHEMA_BYTES if kind in SCHEMAS else MAX_GRAMMAR_BYTES


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A constraint as a client sent it."""

    kind: Kind
    text: str  # JSON for json_schema, structural_tag and choice (a list of strings)
    after: str = ""  # free text comes first, until this marker has occurred; "" = the constraint starts at once
    strict: bool = False  # what of its schemas cannot be enforced is refused, not left out


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


class Grammar(Protocol):
    """The place of one output in its language. Not thread-safe; a method that computes long releases the GIL."""

    def fill_mask(self, mask: Mask) -> None:
        """Writes the tokens that may come next, all words. EOS is among them exactly where the output may end here.

        Where nothing may come next the mask is all zero. Raises GrammarError when a limit on work or memory is
        reached; the object is of no use then.
        """

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. False, and nothing changes, where the token is not allowed. EOS is never passed.

        Raises GrammarError as `fill_mask` does.
        """

    def rollback(self, num_tokens: int) -> None:
        """Goes back to where it was before the last `num_tokens` tokens were accepted."""

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, as the tokenizer would make them of the only text there can be.

        Only those whose place is certain: the last ones are left out where what follows could merge with them. Empty
        where there is a choice. Changes nothing; each can be accepted one after the other. Raises GrammarError as
        `fill_mask` does.
        """

    @property
    def is_accepting(self) -> bool:
        """Returns whether the output may end here."""

    @property
    def is_done(self) -> bool:
        """Returns whether the output can only end here: it is accepted and nothing can follow."""


class CompiledGrammar(Protocol):
    """A language ready for one vocabulary, shared by any number of outputs. Immutable."""

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory it takes."""

    def start(self) -> Grammar:
        """Returns a grammar at the beginning of an output."""


class Backend(Protocol):
    """Compiles languages with one library. Each module of `tureen.grammar.backends` has such a class, made with
    (vocabulary, encode); it raises StartupError with the exact line to type when the library is missing. No module
    imports torch."""

    vocabulary: Vocabulary
    is_bounded: bool  # `load` takes little time and memory, whatever it is given

    def translate(self, language: Language) -> bytes:
        """Does what can be done ahead, in any process: the result is `load`ed. Raises GrammarError for what it cannot
        enforce, naming the other backends that can."""

    def load(self, source: bytes) -> CompiledGrammar:
        """Makes it ready. Raises GrammarError. Releases the GIL where it computes long."""
