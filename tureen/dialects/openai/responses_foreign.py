"""Converts items of tools that only other servers run, in conversations that began there.

Source: https://platform.openai.com/docs/api-reference/responses/create (input).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tureen.contract.params import JsonObject
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.tools import read_arguments

FOREIGN: Final[Mapping[str, str]] = {
    "web_search_call": "ws", "file_search_call": "fs", "code_interpreter_call": "ci", "image_generation_call": "ig",
    "mcp_call": "mcp", "mcp_list_tools": "mcpl", "mcp_approval_request": "mcpr", "mcp_approval_response": "mcpr",
    "computer_call": "cu", "computer_call_output": "cuo", "local_shell_call": "lsh", "local_shell_call_output": "lsho",
    "shell_call": "sh", "shell_call_output": "sho", "apply_patch_call": "apc", "apply_patch_call_output": "apco",
    "tool_search_call": "tsc", "tool_search_output": "tso", "compaction": "cmp",
}  # fmt: skip
"""Type of an item -> the beginning of its id."""

COMPACTION = "compaction"
COMPLETE = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
    "mcp_list_tools",
)  # fmt: skip
"""Types of calls that hold their own result."""

UNREADABLE = "the model cannot read it as text"
DATA_URL = re.compile(r"data:[\w/+.-]{1,80};base64,")

IDS = ("call_id", "id", "approval_request_id")
RESULTS = ("status", "output", "outputs", "results", "result", "error", "tools")
"""Fields of a call that hold its result."""


class ResponsesForeign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="foreign_item"):
    """An item of a tool that another server ran. The model reads it as a call, and its result as JSON."""

    item: JsonObject


class ForeignCall(msgspec.Struct, frozen=True):
    """A call as chat templates read it."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    result: str | None  # as JSON; None if the result is an item of its own


class ForeignCalls:
    """Matches the calls of other servers' tools with their results."""

    def __init__(self) -> None:
        self._calls: dict[str, ForeignCall] = {}  # each id of a call, and each tool -> the last such call

    def call(self, item: Mapping[str, Any], where: str) -> ForeignCall | None:
        """Return the call that an item holds; None for a result. `where` names the item in errors."""
        kind = item["type"]
        if kind.endswith(("_output", "_response")):
            return None
        tool = _tool(kind)
        ids = [item[name] for name in IDS if isinstance(item.get(name), str)]
        inputs = {name: value for name, value in item.items() if name not in ("type", *IDS, *RESULTS)}
        sent = inputs.get("arguments")
        if isinstance(sent, str):
            inputs["arguments"] = read_arguments(sent)
        name = inputs.pop("name", None)
        arguments = inputs.get("arguments")
        results = {name: item[name] for name in RESULTS if name in item}
        if kind == "image_generation_call" and results.pop("result", None):
            ignored.tell(f"{where}.result", UNREADABLE)
        call = ForeignCall(
            id=ids[0] if ids else tool,
            name=name if isinstance(name, str) else tool,
            arguments=arguments if isinstance(arguments, dict | str) else inputs,
            result=_as_json(results, where) if kind in COMPLETE else None,
        )
        self._calls |= dict.fromkeys((*ids, tool), call)
        return call

    def called(self, item: Mapping[str, Any], where: str) -> ForeignCall:
        """Return the call that a result belongs to, with its result. Raises InvalidRequest for an unknown call."""
        name = next((name for name in IDS if name != "id" and name in item), None)
        keys = (item.get("id"), _tool(item["type"])) if name is None else (item[name],)
        call = next((self._calls[key] for key in keys if isinstance(key, str) and key in self._calls), None)
        if call is None:
            field = f"{where}.{name or 'id'}"
            raise InvalidRequest(f"{field} {echo(item.get(name or 'id'))} does not match an earlier call", field=field)
        results = {name: value for name, value in item.items() if name not in ("type", *IDS)}
        return msgspec.structs.replace(call, result=_as_json(results, where))


def screenshot(item: Mapping[str, Any]) -> str | None:
    """Return the picture that is the result of a computer's call; None for other results."""
    output = item.get("output")
    url = output.get("image_url") if item["type"] == "computer_call_output" and isinstance(output, dict) else None
    return url if isinstance(url, str) else None


def _tool(kind: str) -> str:
    for end in ("_output", "_call", "_request", "_response"):
        kind = kind.removesuffix(end)
    return kind


def _as_json(results: dict[str, Any], where: str) -> str:
    """Return results as JSON without pictures and encrypted text, which are reported as ignored."""
    return msgspec.json.encode(_readable(results, where)).decode()


def _readable(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_readable(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, entry in value.items():
        if name.startswith("encrypted_") or (isinstance(entry, str) and DATA_URL.match(entry)):
            ignored.tell(f"{where}.{name}", UNREADABLE)
        else:
            kept[name] = _readable(entry, f"{where}.{name}")
    return kept
