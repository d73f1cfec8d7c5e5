"""Drops the oldest turns of a conversation that does not fit the context (`truncation: auto`), and tells which."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from tureen.errors import ContextExceeded
from tureen.fields import ignored
from tureen.http.chat_answer import prepare_chat
from tureen.requests.chat import Chat
from tureen.requests.drafts import Plan
from tureen.requests.state import ServerState
from tureen.text.messages import Message

WHY = "truncation: auto dropped it, because the conversation exceeds the context"


async def prepare_truncated(
    chat: Chat, sources: Sequence[Sequence[str]], request: Request, state: ServerState
) -> tuple[Plan, int]:
    """Makes the requests of a chat without as many of its oldest turns as it takes to fit, and tells which items these
    were. Returns also how many items they were.

    `sources`: for each message the items that it was made of. Raises as `prepare_chat`.
    """
    try:
        return await prepare_chat(chat, request, state), 0
    except ContextExceeded:
        turns = turns_of(chat.messages)
        if not turns:
            raise
    plan = await prepare_chat(without(chat, turns), request, state)
    fewest, most = 1, len(turns)
    while fewest < most:  # it fits without `most` turns
        middle = (fewest + most) // 2
        try:
            plan = await prepare_chat(without(chat, turns[:middle]), request, state)
            most = middle
        except ContextExceeded:
            fewest = middle + 1
    dropped = [item for turn in turns[:most] for index in turn for item in sources[index]]
    for item in dropped:
        ignored.tell(item, WHY)
    return plan, len(dropped)


def turns_of(messages: Sequence[Message]) -> list[list[int]]:
    """Returns the indices of the messages that may be dropped, in groups that go together, the oldest first.

    Before the last question these are whole turns, from one question to the next; behind it, calls of tools with their
    results. What the system says stays, and so do the last question and the last message.
    """
    turns: list[list[int]] = [[]]
    for index, message in enumerate(messages):
        if message["role"] == "user":
            turns.append([])
        if message["role"] != "system":
            turns[-1].append(index)
    *older, last = turns
    steps: list[list[int]] = []
    for index in last:
        if messages[index]["role"] == "tool" and steps:
            steps[-1].append(index)
        else:
            steps.append([index])
    is_asked = len(turns) > 1
    return [turn for turn in older if turn] + steps[is_asked:-1]


def without(chat: Chat, turns: Sequence[Sequence[int]]) -> Chat:
    """Returns a chat without the messages of some turns, nor their pictures."""
    dropped = {index for turn in turns for index in turn}
    pictures, left = iter(chat.pictures), []
    for index, message in enumerate(chat.messages):
        shown = [next(pictures) for _ in range(_num_pictures(message))]
        left += [] if index in dropped else shown
    messages = tuple(message for index, message in enumerate(chat.messages) if index not in dropped)
    return msgspec.structs.replace(chat, messages=messages, pictures=tuple(left))


def _num_pictures(message: Message) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)
