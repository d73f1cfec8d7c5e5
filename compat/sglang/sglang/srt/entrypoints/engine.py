"""`sgl.Engine`, which is `tureen.Engine` with the settings of SGLang's server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import tureen
from tureen.cli.command_line import parser
from tureen.cli.commands.migrate import migrate, read_command
from tureen.cli.flags import load_config
from tureen.cli.peer_tables import load_peer
from tureen.fields.tools import read_tools


class Engine(tureen.Engine):
    """A model ready to generate. `server_args`: the flags of SGLang's server, by their Python names.

    Raises ValueError for what tureen does not have.
    """

    def __init__(self, **server_args: Any) -> None:
        command = read_command(["sglang.launch_server", *_flags(server_args)], [load_peer("sglang")])
        translated = migrate(command)
        if translated.faults:
            raise ValueError("; ".join(translated.faults))
        super().__init__(load_config(parser(["serve"]).parse_args(["serve", *translated.arguments])))
        self.tokenizer_manager = SimpleNamespace(tokenizer=ChatTokenizer(self))


class ChatTokenizer:
    """The model's tokenizer, as far as the pages use it."""

    def __init__(self, engine: tureen.Engine) -> None:
        self._context = engine._state.context

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._context.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._context.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Return a chat's token ids, or its text, as transformers does. Raises InvalidRequest."""
        templates = self._context.chat_templates
        if isinstance(templates, str):
            raise ValueError(templates)
        own = read_tools(list(tools or ()))
        template = templates.of(own)
        rendered = template.render(
            messages, own, add_generation_prompt=add_generation_prompt, template_kwargs=variables
        )
        text = templates.controls.plain(rendered)
        if not tokenize:
            return text
        token_ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)} if return_dict else token_ids


def _flags(server_args: Mapping[str, Any]) -> list[str]:
    """Returns settings as they are on a command line."""
    flags = []
    for name, value in server_args.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, list | tuple) else [value]
            flags += [one if isinstance(one, str) else json.dumps(one) for one in values]
    return flags
