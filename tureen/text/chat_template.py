"""Renders a chat as text: by the model's own template, by one that the operator named, or by a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError

from tureen.errors import InvalidRequest, StartupError, echo
from tureen.files import read_text
from tureen.log import get_logger
from tureen.text.chat_fallback import Abilities, adapted
from tureen.text.control_tokens import ControlTokens
from tureen.text.messages import Message, Tool
from tureen.text.template_sandbox import OverLimit, Sandbox
from tureen.text.tokenizer import Tokenizer

log = get_logger("chat")

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_LLAVA: Final = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + CHATML
)
VICUNA: Final = (
    "{% if messages[0].role != 'system' %}"
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% endif %}"
    "{% for message in messages %}{% set content = message.content or '' %}"
    "{% if message.role == 'user' %}{{ 'USER: ' + content + ' ' }}"
    "{% elif message.role == 'assistant' %}{{ 'ASSISTANT: ' + content + eos_token }}"
    "{% else %}{{ content + ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
BUILT_IN: Final = {"chatml": CHATML, "chatml-llava": CHATML_LLAVA, "vicuna_v1.1": VICUNA}
"""Built-in templates, as the models of these formats were trained."""

SUFFIX: Final = ".jinja"
MAX_TOLD: Final = 300  # characters of what a template says
GIVEN: Final = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
END_OF_TURN: Final = "<|im_end|>"
NEEDLE: Final = "needle"
FAILURES: Final = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Exceptions that a template can raise, compiled or rendered."""


class ChatTemplate:
    """One template, compiled. Thread-safe.

    Raises one of FAILURES where it does not compile. tokens: texts by the names that templates have for them;
    placeholders: what stands for an image, for a video.
    """

    def __init__(
        self, source: str, controls: ControlTokens, *, tokens: Mapping[str, str], placeholders: Mapping[str, str]
    ) -> None:
        self.source = source
        self._controls = controls
        self._sandbox = Sandbox()
        self._template = self._sandbox.load(source, controls.mark_literals)
        self._tokens = {name: controls.alias(text) for name, text in tokens.items()}
        self._placeholders = {kind: controls.alias(text) for kind, text in placeholders.items()}
        free = _free_names(self._sandbox.parse(source))
        self._knows_tools = "tools" in free
        self.variables = frozenset(free - set(self._sandbox.globals) - GIVEN - set(tokens))
        """The variables that a request may set."""
        self._able = self._probed()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        field: str = "messages",
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, in which control tokens are aliases. Raises InvalidRequest with `field`.

        At its end the assistant's message begins, or nothing does, or the last message goes on.
        """
        if not messages:
            raise InvalidRequest(f"{field} is empty; a chat has at least one message", field=field, code="empty_prompt")
        variables = dict(template_kwargs or {})
        self._check_variables(variables)
        controls = self._controls
        as_dicts = [tool.as_openai() for tool in tools]
        chat = _open_ended(messages, controls.end_mark, field) if continue_final_message else messages
        try:
            found = adapted(chat, as_dicts, self._able, self._placeholders, field)
        except FAILURES as error:
            raise self._refusal(error, field) from None
        if self._able.marked_roles:
            found = [{**one, "role": controls.role(one["role"])} for one in found]
        begins = add_generation_prompt and not continue_final_message
        variables |= {"tools": as_dicts or None, "add_generation_prompt": begins}
        rendering = self._run(found, variables, field)
        if self._able.marked_roles:
            rendering = controls.join_roles(rendering)
        return _cut(rendering, controls.end_mark, field) if continue_final_message else rendering

    def _check_variables(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name == "chat_template":
                raise InvalidRequest(
                    "a chat template in a request is not taken; the operator sets --chat-template",
                    field="chat_template_kwargs",
                    code="chat_template_not_allowed",
                )
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise InvalidRequest(
                    f"chat_template_kwargs: this model's chat template has no variable {echo(name)}; it has: {known}",
                    field="chat_template_kwargs",
                )

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any], field: str) -> str:
        """Raises InvalidRequest with what the template says."""
        try:
            return self._sandbox.render(
                self._template, {**self._tokens, "documents": None, **variables, "messages": messages}
            )
        except OverLimit as error:
            message = f"{field}: the chat template cannot write these: {error.message}; send less, or use another one"
            raise InvalidRequest(message, field=field, code="chat_template_limit") from None
        except FAILURES as error:
            raise self._refusal(error, field) from None

    def _refusal(self, error: BaseException, field: str) -> InvalidRequest:
        said = "too deeply nested" if isinstance(error, RecursionError) else self._controls.plain(str(error))
        shown = "".join(ch if ch.isprintable() else " " for ch in said[:MAX_TOLD])
        message = f"{field}: the model's chat template does not take these: {shown or type(error).__name__}"
        return InvalidRequest(message, field=field)

    # what the template can do, found by trying

    def _probed(self) -> Abilities:
        part = {"type": "text", "text": NEEDLE}
        of_parts = self._tried(_user([part]))
        parts = NEEDLE in of_parts and "'type'" not in of_parts and '"type"' not in of_parts
        strings = NEEDLE in self._tried(_user(NEEDLE)) or not parts
        needle: Any = NEEDLE if strings else [part]
        placed = {
            kind
            for kind, placeholder in self._placeholders.items()
            if parts and placeholder in self._tried(_user([{"type": kind}, part]))
        }
        return Abilities(
            tools=self._knows_tools,
            system=NEEDLE in self._tried({"role": "system", "content": needle}, _user([part] if not strings else "x")),
            strings=strings,
            parts=parts,
            placed=frozenset(placed),
            call_strings=self._wants_call_strings(needle),
            short_ids=self._wants_short_ids(needle),
            marked_roles=self._wants_marked_roles(needle),
        )

    def _tried(self, *messages: Message) -> str:
        """Empty where the template fails."""
        try:
            return self._run(messages, {"tools": None, "add_generation_prompt": True}, "messages")
        except InvalidRequest:
            return ""

    def _wants_call_strings(self, content: Any) -> bool:
        def tried(arguments: Any) -> str:
            function = {"name": "f", "arguments": arguments}
            calls = [{"id": "abcdef123", "type": "function", "function": function}]
            return self._tried(_user(content), {"role": "assistant", "content": "", "tool_calls": calls})

        of_object, text = tried({NEEDLE: NEEDLE}), f'{{"{NEEDLE}": "{NEEDLE}"}}'
        return (not of_object or f"{{'{NEEDLE}'" in of_object) and text in tried(text)

    def _wants_short_ids(self, content: Any) -> bool:
        def takes(name: str) -> bool:
            calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": {}}}]
            made = {"role": "assistant", "content": "", "tool_calls": calls}
            result = {"role": "tool", "tool_call_id": name, "name": "f", "content": content}
            return bool(self._tried(_user(content), made, result))

        return self._knows_tools and takes("abcdef123") and not takes("call_0123456789abcdef01234567")

    def _wants_marked_roles(self, content: Any) -> bool:
        controls = self._controls

        def chat(name: Any) -> list[Message]:
            return [{"role": name(role), "content": content} for role in ("user", "assistant", "user")]

        spelled = controls.count_spelled(self._tried(*chat(str)))
        if not spelled:
            return False
        left = controls.count_spelled(controls.join_roles(self._tried(*chat(controls.role))))
        if left:
            log.warning("the chat template makes control tokens out of pieces; they reach the model as plain text")
        return left < spelled


class ChatTemplates(NamedTuple):
    """A server's."""

    plain: ChatTemplate
    with_tools: ChatTemplate
    controls: ControlTokens
    end_id: int | None  # ends a turn in a format of ours, whatever the model's settings say

    def of(self, tools: Sequence[Tool]) -> ChatTemplate:
        return self.with_tools if tools else self.plain


def check_chat_template(given: str | None) -> None:
    """Raises StartupError for a name that is not known, and for a file that is not there or does not compile."""
    if given is None or given in BUILT_IN:
        return
    if not given.endswith(SUFFIX):
        raise StartupError(
            f"--chat-template {echo(given)}: there is no such template; use {', '.join(BUILT_IN)} or a {SUFFIX} file",
            field="chat_template",
        )
    try:
        Sandbox().load(_read(given), lambda tree: tree)
    except FAILURES as error:
        raise StartupError(f"--chat-template {given}: {_line(error)}", field="chat_template") from None


def load_chat_templates(
    given: str | None,
    tokenizer: Tokenizer,
    pictures: Mapping[str, tuple[str, int]],
    *,
    allow_spelled: bool = False,
) -> ChatTemplates | str:
    """The server's templates, or why it has none. pictures: image, video -> placeholder, and what to have as its id."""
    sources = _sources(given, tokenizer)
    if sources is None:
        return "this model has no chat template; the operator can give one by --chat-template, such as chatml"
    controls = ControlTokens(tokenizer, dict(pictures.values()), allow_spelled=allow_spelled)
    placeholders = {kind: text for kind, (text, _) in pictures.items()}
    plain, with_tools = sources
    end_id = tokenizer.token_id(END_OF_TURN) if plain.endswith(CHATML) else None
    try:
        found = [
            ChatTemplate(source, controls, tokens=tokenizer.named_tokens, placeholders=placeholders)
            for source in dict.fromkeys((plain, with_tools or plain))
        ]
    except FAILURES as error:
        message = f"the model's chat template does not compile: {_line(error)}"
        log.warning("%s; chats get an error: give another one by --chat-template", message)
        return f"{message}; the operator can give another one by --chat-template, such as chatml"
    return ChatTemplates(found[0], found[-1], controls, end_id)


def _sources(given: str | None, tokenizer: Tokenizer) -> tuple[str, str | None] | None:
    """The template, and the one for chats with tools where that is another."""
    if given is not None and given not in BUILT_IN:
        return _read(given), None
    if given is None and tokenizer.chat_template is not None:
        return tokenizer.chat_template, tokenizer.tool_template
    if given is None and tokenizer.token_id("<|im_start|>") is None:
        return None
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("") == [tokenizer.bos_token_id]
    return ("{{ bos_token }}" if begins else "") + BUILT_IN[given or "chatml"], None


def _read(file: str) -> str:
    """Raises StartupError."""
    try:
        return read_text(Path(file).expanduser())
    except FileNotFoundError:
        raise StartupError(f"--chat-template {file}: there is no such file", field="chat_template") from None
    except OSError as error:
        raise StartupError(f"--chat-template {file}: {error.strerror}", field="chat_template") from None
    except UnicodeDecodeError:
        raise StartupError(f"--chat-template {file}: is not UTF-8", field="chat_template") from None


def _free_names(tree: nodes.Template) -> set[str]:
    """Variables that the template reads from outside; one that it sets as well only where it asks whether it is
    given."""
    names = list(tree.find_all(nodes.Name))
    asking = [one for one in tree.find_all(nodes.Test) if one.name in ("defined", "undefined")]
    defaults = [one for one in tree.find_all(nodes.Filter) if one.name in ("default", "d")]
    asked = {one.node.name for one in (*asking, *defaults) if isinstance(one.node, nodes.Name)}
    set_here = {one.name for one in names if one.ctx != "load"}
    return meta.find_undeclared_variables(tree) - (set_here - asked)


def _line(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    text = "".join(ch if ch.isprintable() else " " for ch in (str(error) or type(error).__name__)[:MAX_TOLD])
    return text if line is None else f"{text} (line {line})"


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _open_ended(messages: Sequence[Message], mark: str, field: str) -> list[Message]:
    """With a mark where the last message's text ends. Raises InvalidRequest."""
    last = messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or last.get("tool_calls"):
        got = f"is of the role {last['role']}" if last["role"] != "assistant" else "has tool_calls"
        raise InvalidRequest(
            f"{field}: only a message of the assistant without tool_calls can be continued; the last one {got}",
            field=field,
        )
    mark += " "  # shows whether the template trims what it writes
    if isinstance(content, str):
        content += mark
    elif isinstance(content, list) and content and content[-1]["type"] == "text":
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise InvalidRequest(f"{field}: the last message has no text at its end to be continued", field=field)
    return [*messages[:-1], {**last, "content": content}]


def _cut(rendering: str, mark: str, field: str) -> str:
    """Returns the text before the mark. Raises InvalidRequest where there is no mark."""
    before, found, after = rendering.rpartition(mark)
    if not found:
        message = f"{field}: the model's chat template does not write the last message's text, to be continued"
        raise InvalidRequest(message, field=field)
    return before if after.startswith(" ") else before.rstrip()
