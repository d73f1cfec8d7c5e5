"""An oracle for masks: languages in llguidance, whose terminals are derivatives of regular expressions, and whose rules
are parsed by Earley's algorithm.

A language is written as a grammar in llguidance's dialect of Lark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring

import llguidance
import numpy as np
from llguidance_masks.patterns import count, pattern
from llguidance_masks.terminals import TerminalGrammar, terminal_grammar
from llguidance_masks.tokens import TokenSets
from numpy.typing import NDArray

from tureen.grammar.base import Encode, Mask, Vocabulary
from tureen.grammar.expression import (
    Both,
    Chain,
    Choice,
    Expression,
    GrammarError,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.rules import parts

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=400_000,
    step_max_items=100_000,
    max_lexer_states=60_000,  # about 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,  # an error would hold the whole grammar
)
ANY_TEXT = "/(?s:.*)/"
NO_FORCING = '%llguidance {"no_forcing": true}'
"""All tokens that fit are allowed, not only the tokenizer's own way to write a text that is forced."""

END = b"</s>"
MAX_USES = 4
"""The places in rules that a terminal may have without a rule of its own."""
MAX_OPEN = 20
"""The parentheses around the deepest part of a rule that is written where it stands. The library takes 28."""


class Llguidance:
    """llguidance for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.vocabulary = vocabulary
        self._tokens = TokenSets(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(_Tokenizer(vocabulary, encode))  # type: ignore[arg-type]  # by shape

    def translate(self, language: Language) -> bytes:
        """Returns the grammar as UTF-8. Raises GrammarError."""
        return lark(language).encode()

    def load(self, source: bytes) -> LlguidanceCompiled:
        """Compiles the grammar. Raises GrammarError."""
        grammar = llguidance.LLMatcher.grammar_from_lark(source.decode())
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise too_complex(matcher)
        return LlguidanceCompiled(matcher, self._tokens)


class LlguidanceCompiled:
    """A matcher at the beginning."""

    def __init__(self, matcher: llguidance.LLMatcher, tokens: TokenSets) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def start(self) -> LlguidanceGrammar:
        return LlguidanceGrammar(self._matcher.deep_copy(), self._tokens)


class LlguidanceGrammar:
    """A matcher somewhere in an output."""

    def __init__(self, matcher: llguidance.LLMatcher, tokens: TokenSets) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._mask: NDArray[np.uint32] | None = None  # of this place, without EOS

    def fill_mask(self, mask: Mask) -> None:
        mask[:] = self._allowed()
        if self._matcher.is_accepting():
            mask |= self._tokens.ends

    def accept(self, token_id: int) -> bool:
        if not self._tokens.is_text(token_id):
            return False
        is_consumed = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():
            raise too_complex(self._matcher)
        if not is_consumed:
            return False
        self._mask = None
        return True

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._mask = None

    @property
    def is_accepting(self) -> bool:
        return self._matcher.is_accepting() and not self._matcher.is_error()

    @property
    def is_done(self) -> bool:
        """The library knows at once of most ends, not of all: then the mask tells."""
        if not self.is_accepting:
            return False
        return self._matcher.is_stopped() or not self._allowed().any()

    def _allowed(self) -> NDArray[np.uint32]:
        if self._mask is None:
            row_words = (self._tokens.count + 1) // 32 + 1  # for one bit more than it has tokens, END among them
            row = np.zeros(max(row_words, self._tokens.words), dtype=np.uint32)
            if not self._matcher.is_stopped():
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row_words * 4)
            if self._matcher.is_error():
                raise too_complex(self._matcher)
            self._mask = row[: self._tokens.words] & self._tokens.texts
        return self._mask


class _Tokenizer:
    """The tokenizer's interface that LLTokenizer asks for. It is given an end of its own, so that the model's ends are
    never its business."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens: Sequence[bytes] = [*vocabulary.tokens, END]
        self.eos_token_id = len(vocabulary.tokens)
        self.special_token_ids = [self.eos_token_id]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def too_complex(matcher: llguidance.LLMatcher) -> GrammarError:
    """Returns the error of a matcher that gave up."""
    why = matcher.get_error().partition("\n<")[0]  # without the library's remark that it says no more
    return GrammarError(f"llguidance gave up: {why[:200]}")


def lark(language: Language) -> str:
    """Returns the language in llguidance's dialect of Lark. Raises GrammarError."""
    grammar = terminal_grammar(language)
    terminals = {name: _if_plain(item) for name, item in grammar.terminals.items()}
    rules = _Rules(grammar, terminals)
    lines = [NO_FORCING, f"start: {rules.text(grammar.start)}"]
    lines += [f"{name}: {rules.body(grammar.rules[name])}" for name in rules.named]  # which grows
    lines += [f"{name}: {body}" for body, name in rules.shared.items()]
    for name, text in terminals.items():
        if text is None:
            mixed: dict[int, bool] = {}
            _mixed(grammar.terminals[name], mixed)
            lines.append(f"{name}: {_terminal(grammar.terminals[name], mixed)}")
        elif 1 < grammar.uses[name] <= MAX_USES:
            lines.append(f"{name}: {text}")
    return "\n".join(lines) + "\n"


class _Rules:
    """Writes rules. The library takes each place of a name for a new symbol, looks through all terminals for each place
    of one, and takes its time for each rule: what is held often is a rule of its own, and what is held once is none."""

    def __init__(self, grammar: TerminalGrammar, terminals: Mapping[str, str | None]) -> None:
        """`terminals`: their patterns; None where no pattern says it."""
        self.shared: dict[str, str] = {}  # by their texts: the names of these rules
        self.named = [name for name in grammar.rules if grammar.uses[name] > 1]  # rules that are to be written
        self._rules = grammar.rules
        self._names = {name: name for name in self.named}
        self._open = self._deepest = 0  # parentheses: here, and around the deepest part that was written
        self._names |= {name: name if text is None else text for name, text in terminals.items()}
        for name in terminals:
            if grammar.uses[name] > MAX_USES:
                self._names[name] = self.shared.setdefault(self._names[name], f"t{len(self.shared)}")
            elif grammar.uses[name] > 1:
                self._names[name] = name

    def body(self, expression: Expression) -> str:
        """Returns the text of a whole rule."""
        return self._choice(expression.items) if isinstance(expression, Choice) else self.text(expression)

    def text(self, expression: Expression) -> str:
        """Returns the text of a part of a rule."""
        if isinstance(expression, RuleCall):
            return self._names.get(expression.name) or self._inlined(expression.name)
        if isinstance(expression, Chain):
            return f"({' '.join(self._texts(expression.items))})" if expression.items else '""'
        if isinstance(expression, Choice):
            text = self._choice(expression.items)
            return self.shared.setdefault(text, f"t{len(self.shared)}") if _are_calls(expression.items) else text
        match expression:
            case Repeat(Chain(items), least, most) if items:
                return self.text(expression.item) + count(least, most)
            case Repeat(item, least, most):
                return f"({self._texts((item,))[0]}){count(least, most)}"
        raise TypeError(f"not over terminals: {type(expression).__name__}")

    def _inlined(self, name: str) -> str:
        """Returns the text of a rule that stands in one place only; its name where it would be too deep there."""
        if self._open < MAX_OPEN:
            before, self._deepest = self._deepest, self._open
            text = self.body(self._rules[name])
            if self._deepest <= MAX_OPEN:
                self._deepest = max(before, self._deepest)
                return text
            self._deepest = before
        self._names[name] = name
        self.named.append(name)
        return name

    def _choice(self, items: Sequence[Expression]) -> str:
        return f"({' | '.join(self._texts(items))})"

    def _texts(self, items: Sequence[Expression]) -> list[str]:
        """Returns the texts of what stands in parentheses."""
        self._open += 1
        self._deepest = max(self._deepest, self._open)
        known = self._names.get
        texts = [(known(item.name) if isinstance(item, RuleCall) else None) or self.text(item) for item in items]
        self._open -= 1
        return texts


def _are_calls(items: Sequence[Expression]) -> bool:
    return len(items) > 1 and all(type(item) is RuleCall for item in items)


def _if_plain(expression: Expression) -> str | None:
    """A terminal's definition; None where no pattern says it."""
    try:
        return _plain_terminal(expression)
    except ValueError:
        return None


def _plain_terminal(expression: Expression) -> str:
    """A terminal's definition. Raises ValueError where no pattern says it."""
    if isinstance(expression, Text):
        return encode_basestring(expression.text).replace("\x7f", "\\u007f")
    return _pattern_terminal(expression)


@lru_cache(256)
def _pattern_terminal(expression: Expression) -> str:
    """A pattern, written once: those of strings, of keys and of numbers are in nearly every schema."""
    return f"/{pattern(expression)}/" if expression != Chain(()) else '""'


def _terminal(expression: Expression, mixed: dict[int, bool]) -> str:
    """A terminal's definition. `&` and `~` can only be written outside of patterns."""
    if not mixed[id(expression)]:
        return _plain_terminal(expression)
    match expression:
        case Both(first, second):
            return f"({_terminal(first, mixed)} & {_terminal(second, mixed)})"
        case Not(item):
            return f"({ANY_TEXT} & ~({_terminal(item, mixed)}))"  # ~ alone would match what is no UTF-8
        case Chain(items):
            return f"({' '.join([_terminal(item, mixed) for item in items])})"
        case Choice(items):
            return f"({' | '.join([_terminal(item, mixed) for item in items])})"
        case Repeat(item, least, most):
            return f"({_terminal(item, mixed)}){count(least, most)}"
        case Terminal(item):
            return _terminal(item, mixed)
    raise GrammarError(f"only what is regular can be combined with & or excluded: {type(expression).__name__}")


def _mixed(expression: Expression, mixed: dict[int, bool]) -> bool:
    """Tells of a part and those in it, by id, whether they hold Both or Not; each is looked at once."""
    is_mixed = mixed.get(id(expression))
    if is_mixed is None:
        inside = [_mixed(part, mixed) for part in parts(expression)]
        is_mixed = mixed[id(expression)] = any(inside) or isinstance(expression, Both | Not)
    return is_mixed
