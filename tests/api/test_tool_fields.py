"""Tools and tool choices as OpenAI writes them: what is taken, and what is said of the rest."""

import pytest

from tureen.errors import InvalidRequest
from tureen.fields.tools import MAX_TOOLS, check_tools, chosen_tools, read_tool_choice, read_tools
from tureen.text.messages import Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather in a city.", "parameters": SCHEMA, "strict": True}
TOOLS = (Tool(name="get_weather"), Tool(name="time"))


def entry(**function):
    return {"type": "function", "function": {"name": "f", **function}}


def test_tools_are_read_as_openai_documents_them():
    found = read_tools([entry(**WEATHER), entry(name="A.b-c_9", description=None, parameters=None, strict=None)])
    assert found == (
        Tool(name="get_weather", description="Weather in a city.", parameters=SCHEMA, strict=True),
        Tool(name="A.b-c_9"),
    )
    assert found[0].as_openai()["function"]["parameters"] == SCHEMA
    assert read_tools(None) == read_tools([]) == ()


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({}, "tools", "list"),
        (["f"], "tools[0]", "object"),
        ([{"function": {"name": "f"}}], "tools[0].type", "missing"),
        ([{"type": "web_search"}], "tools[0].type", "web_search"),
        ([{"type": "function"}], "tools[0].function", "missing"),
        ([{"type": "function", "name": "f"}], "tools[0].function", "missing"),
        ([{"type": "function", "function": []}], "tools[0].function", "object"),
        ([entry(name=None)], "tools[0].function.name", "missing"),
        ([entry(name=7)], "tools[0].function.name", "7"),
        ([entry(name="")], "tools[0].function.name", "''"),
        ([entry(name="a b")], "tools[0].function.name", "a b"),
        ([entry(name="a\n")], "tools[0].function.name", "a"),
        ([entry(name="ü")], "tools[0].function.name", "ü"),
        ([entry(name="n" * 65)], "tools[0].function.name", "nnn"),
        ([entry(), entry()], "tools[1].function.name", "duplicate"),
        ([entry(parameters=[])], "tools[0].function.parameters", "object"),
        ([entry(parameters={"type": "string"})], "tools[0].function.parameters", "string"),
        ([entry(parameters={"type": ["object", "null"]})], "tools[0].function.parameters", "object"),
        ([entry(strict="yes")], "tools[0].function.strict", "yes"),
        ([entry(), entry(name="g", paramters={})], "tools[1].function.paramters", "did you mean 'parameters'"),
        ([entry(name=f"f{index}") for index in range(MAX_TOOLS + 1)], "tools", "128"),
    ],
)
def test_what_is_wrong_with_tools_is_named(given, field, says):
    with pytest.raises(InvalidRequest) as caught:
        read_tools(given)
    assert caught.value.field == field
    assert field.rpartition(".")[2] in caught.value.message
    assert says in caught.value.message


def test_as_many_tools_as_allowed_are_taken():
    assert len(read_tools([entry(name=f"f{index}") for index in range(MAX_TOOLS)])) == MAX_TOOLS


def test_an_api_that_writes_tools_otherwise_hears_of_its_own_fields():
    with pytest.raises(InvalidRequest) as caught:
        check_tools([Tool(name="f", parameters={"type": "array"})], "tools", parameters="input_schema")
    assert caught.value.field == "tools[0].input_schema"


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "time"}}, ToolChoice("required", "time")),
        ({"function": {"name": "time"}}, ToolChoice("required", "time")),
    ],
)
def test_each_form_of_a_choice_is_read(given, choice):
    assert read_tool_choice(given, TOOLS) == choice


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_the_model_only_these(mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "time"}}]}
    chosen = chosen_tools({"type": "allowed_tools", "allowed_tools": allowed}, TOOLS)
    assert ([tool.name for tool in chosen.tools], chosen.places, chosen.choice) == (["time"], (1,), ToolChoice(mode))
    for bad, field in (
        (None, "tool_choice.allowed_tools"),
        (allowed | {"mode": "none"}, "tool_choice.allowed_tools.mode"),
        (
            allowed | {"tools": [{"type": "function", "function": {"name": "date"}}]},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"mode": "required", "tools": []}, "tool_choice"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            chosen_tools({"type": "allowed_tools", "allowed_tools": bad}, TOOLS)
        assert caught.value.field == field


@pytest.mark.parametrize("given", [None, "auto", "none"])
def test_without_tools_there_is_nothing_to_choose(given):
    assert read_tool_choice(given, ()) == ToolChoice("none")


@pytest.mark.parametrize(
    ("given", "tools", "field", "says"),
    [
        ("any", TOOLS, "tool_choice", "required"),
        ("required", (), "tool_choice", "no tools"),
        ({"type": "function", "function": {"name": "time"}}, (), "tool_choice", "no tools"),
        ({"type": "function", "function": {"name": "date"}}, TOOLS, "tool_choice.function.name", "get_weather, time"),
        ({"type": "function", "function": {}}, TOOLS, "tool_choice.function.name", "missing"),
        ({"type": "function", "function": {"name": "time", "nam": 1}}, TOOLS, "tool_choice.function.nam", "unknown"),
        ({"type": "allowed_tools", "allowed_tools": {}}, TOOLS, "tool_choice.type", "allowed_tools"),
        ({"name": "time"}, TOOLS, "tool_choice.type", "missing"),
        (["time"], TOOLS, "tool_choice", "object"),
        (True, TOOLS, "tool_choice", "true"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused_by_name(given, tools, field, says):
    with pytest.raises(InvalidRequest) as caught:
        read_tool_choice(given, tools)
    assert caught.value.field == field
    assert says in caught.value.message
