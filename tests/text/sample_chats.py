"""Random chats, whose texts are full of what templates and tokenizers look at."""

from __future__ import annotations

from hypothesis import strategies as st
from template_samples import ORDINARY, SPECIAL

PIECES = [
    *SPECIAL,
    *ORDINARY,
    "<|im_",
    "end|>",
    "<|",
    "|>",
    "user",
    "im_end",
    "[INST",
    "]",
    " ",
    "  ",
    "\n",
    "\n\n",
    "a",
    "é",
]
PIECES += [
    "<tool_response>",
    "{'type'",
    "日本",
    "\u0301",
    "\U0010fffd",
    "\U000f0000",
    "{{ x }}",
    "{% raw %}",
    "%s",
    "\\n",
    '"',
]
texts = (
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join).map(lambda text: _encodable(text))
)
words = texts.filter(bool)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "ignore").decode()


@st.composite
def chats(draw, system=True, tools=False, reasoning=False, texts=texts):
    """Messages with texts, in turns; with tools the assistant also calls one, and its result follows."""
    messages = [{"role": "system", "content": draw(texts)}] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        if tools and draw(st.booleans()):
            arguments = draw(st.dictionaries(words, texts | st.integers(-5, 5) | st.none(), max_size=2))
            function = {"name": draw(words), "arguments": arguments}
            call = {"id": "abcdef123", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": draw(texts), "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(texts), "tool_call_id": "abcdef123"})
        thought = {"reasoning_content": draw(texts)} if reasoning and draw(st.booleans()) else {}
        messages.append({"role": "assistant", "content": draw(texts), **thought})
    return messages if draw(st.booleans()) else messages[:-1]
