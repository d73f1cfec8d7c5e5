"""The backend that uses xgrammar: a pushdown automaton over bytes, the masks of its states worked out when it compiles.

Only the library's compiled part is imported: its Python part wants transformers and torch, which nothing here needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.grammar.backends.forced import ForcedText
from tureen.grammar.backends.gbnf import gbnf
from tureen.grammar.backends.tokens import TokenSets
from tureen.grammar.base import Encode, Mask, Vocabulary
from tureen.grammar.expression import GrammarError, Language

RAW = 0  # the vocabulary's tokens are the bytes they stand for
THREADS = 1  # helper processes are forked, and threads would be missing in them
LATER_MASKS = False  # compute all masks at compile time


class XgrammarBackend:
    """xgrammar for one vocabulary."""

    is_bounded = False

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self._library = compiled_part()
        self.vocabulary = vocabulary
        self._tokens = TokenSets(vocabulary)
        self._forced_text = ForcedText(vocabulary, encode)
        texts = [token if self._tokens.is_text(index) else b"" for index, token in enumerate(vocabulary.tokens)]
        ends = list(vocabulary.eos_token_ids)
        info = self._library.TokenizerInfo(texts, RAW, vocabulary.size, ends, False)
        self._compiler = self._library.GrammarCompiler(info, THREADS, False, -1, LATER_MASKS)

    def translate(self, language: Language) -> bytes:
        """Returns the grammar as UTF-8. Raises GrammarError."""
        return gbnf(language).encode()

    def load(self, source: bytes) -> XgrammarCompiled:
        """Compiles the grammar: the library's own form of a compiled one takes longer to read. Raises GrammarError."""
        try:
            compiled = self._compiler.compile_grammar_from_strings(source.decode(), "root")
        except RuntimeError as error:
            raise refused(error) from None
        return XgrammarCompiled(self._library, compiled, self._tokens, self._forced_text)


def refused(error: RuntimeError) -> GrammarError:
    """Returns the error for the client when the library gave up."""
    return GrammarError(f"too complex for --grammar-backend xgrammar: {str(error)[:200]}")


class XgrammarCompiled:
    """A pushdown automaton with its masks."""

    def __init__(self, library: ModuleType, compiled: Any, tokens: TokenSets, forced_text: ForcedText) -> None:
        self._library = library
        self._made = compiled
        self._tokens = tokens
        self._forced_text = forced_text

    @property
    def num_bytes(self) -> int:
        return int(self._made.memory_size_bytes())

    def start(self) -> XgrammarGrammar:
        matcher = self._library.GrammarMatcher(self._made, None, False, -1, None)
        return XgrammarGrammar(matcher, self._tokens, self._forced_text)


class XgrammarGrammar:
    """A matcher somewhere in an output."""

    def __init__(self, matcher: Any, tokens: TokenSets, forced_text: ForcedText) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._forced_text = forced_text
        self._mask: NDArray[np.uint32] | None = None  # of this place, without EOS

    def fill_mask(self, mask: Mask) -> None:
        mask[:] = self._allowed()
        if self.is_accepting:
            mask |= self._tokens.ends

    def accept(self, token_id: int) -> bool:
        if not self._tokens.is_text(token_id) or not self._matcher.accept_token(token_id, False):
            return False
        self._mask = None
        return True

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._mask = None

    def forced(self) -> list[int]:
        if self.is_accepting:
            return []
        text = self._matcher.find_jump_forward_string().encode()
        if not text:
            return []
        return self._forced_text.tokens(text, XgrammarGrammar(self._matcher.fork(), self._tokens, self._forced_text))

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def is_done(self) -> bool:
        return self.is_accepting and not self._allowed().any()

    def _allowed(self) -> NDArray[np.uint32]:
        if self._mask is None:
            row = np.zeros((1, self._tokens.words), dtype=np.int32)
            self._matcher.fill_next_token_bitmask(row, 0, False)
            self._mask = row[0].view(np.uint32) & self._tokens.texts
        return self._mask


def compiled_part() -> ModuleType:
    """Returns the classes that the library's compiled code offers.

    The package is entered without running its `__init__`, and the bridge to its code is imported as if torch, which it
    would import for nothing, were not there.
    """
    loaded = sys.modules.get("xgrammar.tvm_ffi_binding._ffi_api")
    if loaded is not None:
        return loaded
    hidden = {name: sys.modules.get(name) for name in ("torch", "xgrammar")}
    spec = importlib.util.find_spec("xgrammar")
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    try:
        if hidden["torch"] is None:
            sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
            importlib.import_module("tvm_ffi")
            del sys.modules["torch"]
        sys.modules["xgrammar"] = package
        importlib.import_module("xgrammar.load_binding")
        return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")
    finally:
        for name, module in hidden.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
