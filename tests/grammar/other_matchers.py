"""Other libraries' own readers of grammars and tags, asked whether they take a text: oracles over bytes."""

from __future__ import annotations

import functools

import llguidance
import xgrammar

BYTES = [bytes([byte]) for byte in range(256)]


class _ByteTokens:
    is_tokenizer_wrapper = True
    bos_token_id = None
    tokens = (*BYTES, b"</s>")
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def llguidance_tokens():
    return llguidance.LLTokenizer(_ByteTokens())


@functools.cache
def _llguidance_matcher(lark):
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    return llguidance.LLMatcher(llguidance_tokens(), grammar, log_level=0)


def llguidance_takes(lark, text):
    """Whether llguidance's own reader of Lark takes the text."""
    matcher = _llguidance_matcher(lark).deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@functools.cache
def _xgrammar_compiler():
    info = xgrammar.TokenizerInfo([*BYTES, b"</s>"], vocab_size=257, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


@functools.cache
def compiled_lark(lark):
    return _xgrammar_compiler().compile_lark(lark)


@functools.cache
def compiled_tag(tag):
    """`tag`: the JSON of a structural tag."""
    return _xgrammar_compiler().compile_structural_tag(tag)


def xgrammar_takes(compiled, text):
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)
    return matcher.accept_string(text) and matcher.accept_token(256)
