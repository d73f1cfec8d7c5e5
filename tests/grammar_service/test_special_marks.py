"""Marks that are special tokens are written as such, where a constraint says so, and nowhere else."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_tokenizer import EOS, make_byte_tokenizer

from tureen.build import _compiler
from tureen.config import Config
from tureen.grammar import GrammarSpec, Vocabulary
from tureen.grammar_service.compile_worker import compile_with
from tureen.grammar_service.loading import LazyCompilers
from tureen.grammar_service.messages import CompilerSetup
from tureen.text.messages import CallArguments, CallStart, Tool, ToolChoice
from tureen.text.tools import PARSERS, constraint

DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
STEP3 = tuple(mark.replace("▁", "_") for mark in DEEPSEEK)
SPECIAL = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "granite": ("<|tool_call|>",),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "kimi_k2": KIMI,
    "step3": STEP3,
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
}  # fmt: skip
HEADS = {"gpt-oss": "<|channel|>commentary to=functions.tags"}
FIRST = 258  # the id of the first special token beside those of the byte tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"t": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 2}},
    "required": ["t"],
    "additionalProperties": False,
}
TOOLS = (Tool(name="tags", parameters=SCHEMA, strict=True),)


def vocabulary_of(name: str) -> Vocabulary:
    tokenizer = make_byte_tokenizer(*SPECIAL[name])
    compiler = _compiler(Config(), tokenizer, (EOS,), FIRST + len(SPECIAL[name]))
    assert compiler is not None
    return compiler._make_vocabulary()


class Compiled:
    """A constraint, compiled as a worker does it and loaded as an engine does."""

    def __init__(self, name: str, spec: GrammarSpec) -> None:
        self._tokenizer = make_byte_tokenizer(*SPECIAL[name])
        self.vocabulary = vocabulary_of(name)
        compilers = LazyCompilers(self.vocabulary, lambda text: self._tokenizer.encode(text, add_special_tokens=False))
        self.reply = compile_with(CompilerSetup(self.vocabulary))(spec)
        self.grammar = compilers.load(self.reply)

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_ids: list[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")

    def allowed(self, place: Any) -> list[int]:
        mask = np.zeros(-(-self.vocabulary.size // 32), dtype=np.uint32)
        place.fill_mask(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def calls_in(name: str, text: str) -> list[str]:
    parser, calls = PARSERS[name].parser(TOOLS), []
    for part in (*parser.feed(text), *parser.close()):
        if isinstance(part, CallStart):
            calls.append("")
        elif isinstance(part, CallArguments):
            calls[-1] += part.text
    return calls


def tag_of(name: str, mode: str) -> GrammarSpec:
    tag = constraint(PARSERS[name], TOOLS, ToolChoice(mode), parallel=True)
    return GrammarSpec("structural_tag", json.dumps(tag), strict=True)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_strict_call_behind_a_special_token_has_valid_arguments(name, mode):
    compiled, count = Compiled(name, tag_of(name, mode)), 0
    assert compiled.reply.has_specials
    for seed in range(8):
        dice, place, written = random.Random(f"{name}{seed}"), compiled.grammar.start(), []
        wish = compiled.tokens(("So: " if mode == "auto" else "") + HEADS.get(name, SPECIAL[name][0]))
        assert max(wish) >= FIRST
        while not place.is_done and len(written) < 2000:
            tokens = compiled.allowed(place)
            if EOS in tokens and (tokens == [EOS] or (not wish and calls_in(name, compiled.text(written)))):
                break
            token = wish.pop(0) if wish else dice.choice([token for token in tokens if token != EOS])
            assert token in tokens, (compiled.text(written), token)
            assert place.accept(token)
            written.append(token)
            for forced in place.forced():
                assert place.accept(forced)
                written, wish = [*written, forced], []
        calls = calls_in(name, compiled.text(written))
        count += len(calls)
        for arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMA)
        assert compiled.grammar.least is not None
    assert count >= 8


@pytest.mark.parametrize("name", SPECIAL)
def test_free_text_before_a_call_may_be_any_and_the_answer_may_be_no_call(name):
    compiled = Compiled(name, tag_of(name, "auto"))
    place = compiled.grammar.start()
    for token in compiled.tokens("Just {text} [of] <any> kind."):
        assert place.accept(token)
    assert EOS in compiled.allowed(place)


@pytest.mark.parametrize("name", SPECIAL)
def test_other_constraints_never_hold_a_special_token(name):
    tag = '{"type": "structural_tag", "format": {"type": "any_text"}}'
    for kind, text in (("regex", "(.|\n)*"), ("json_schema", '{"type": "string"}'), ("structural_tag", tag)):
        spec = GrammarSpec(kind, text)
        compiled = Compiled(name, spec)
        place = compiled.grammar.start()
        assert not compiled.reply.has_specials
        for token in compiled.tokens('"') if spec.kind == "json_schema" else ():
            assert place.accept(token)
        assert [token for token in compiled.allowed(place) if token > EOS] == []
        assert not place.accept(FIRST)


def test_a_structural_tag_of_a_client_may_ask_for_special_tokens():
    layout = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "x[ARGS]"}, {"type": "regex", "pattern": "y"}],
    }
    for asks in (True, False):
        text = json.dumps({"type": "structural_tag", "format": layout, "special_tokens": asks})
        compiled = Compiled("mistral", GrammarSpec("structural_tag", text))
        place = compiled.grammar.start()
        assert place.accept(ord("x"))
        assert (FIRST + 1 in compiled.allowed(place)) is asks
        assert ord("[") in compiled.allowed(place)


def test_where_no_mark_is_special_there_is_no_second_vocabulary():
    compiler = _compiler(Config(), make_byte_tokenizer("<|im_start|>", "<pad>"), (EOS,), FIRST + 2)
    assert compiler is not None
    assert compiler._make_vocabulary().specials == ()
