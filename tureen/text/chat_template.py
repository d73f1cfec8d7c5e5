"""Renders chats as text, by the model's template, a built-in one, or a file that --chat-template names."""

from __future__ import annotations

import marshal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError

from tureen.errors import InvalidRequest, StartupError, echo
from tureen.files import read_text
from tureen.log import get_logger
from tureen.text.chat_fallback import Abilities, adapted
from tureen.text.chat_template_json import JsonTemplate, read_json_template
from tureen.text.control_tokens import ControlTokens
from tureen.text.messages import Message, Tool
from tureen.text.template_jobs import Failed, Variables, do_job, read_answer, write_job
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
LLAMA_2: Final = (
    "{% set said = namespace(system='') %}"
    "{% for message in messages %}{% set content = message.content or '' %}"
    "{% if message.role == 'system' %}"
    "{% set said.system = '<<SYS>>\n' + content + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'assistant' %}{{ ' ' + content + ' ' + eos_token + bos_token }}"
    "{% else %}{{ '[INST] ' + said.system + content + ' [/INST]' }}{% set said.system = '' %}{% endif %}"
    "{% endfor %}"
)
BUILT_IN: Final = {"chatml": CHATML, "chatml-llava": CHATML_LLAVA, "vicuna_v1.1": VICUNA, "llama-2": LLAMA_2}
"""Built-in templates, by the names that SGLang's --chat-template has for them."""

SUFFIX, JSON_SUFFIX = ".jinja", ".json"
MAX_TOLD: Final = 300  # characters of a template's error that are shown
OWN_VARIABLES: Final = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that the server sets, and requests may not."""
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
AT_LIMIT: Final = "chat_template_limit"
"""The code of the error about a template that takes too much time or memory."""


class ChatTemplate:
    """A compiled template. Thread-safe.

    Raises one of FAILURES when it does not compile. `tokens`: name in templates, such as bos_token -> its text;
    `placeholders`: image, video -> the text that stands for it; `do`: renders, see template_jobs.py.
    """

    def __init__(
        self,
        source: str,
        controls: ControlTokens,
        *,
        tokens: Mapping[str, str],
        placeholders: Mapping[str, str],
        do: Callable[[bytes], bytes] = do_job,
    ) -> None:
        self.source = source
        self.controls = controls
        self._do = do
        sandbox = Sandbox()
        self._code = marshal.dumps(sandbox.code_of(source, controls.mark_literals))
        self._tokens = {name: controls.alias(text) for name, text in tokens.items()}
        self._placeholders = {kind: controls.alias(text) for kind, text in placeholders.items()}
        free = _free_names(sandbox.parse(source))
        self._knows_tools = "tools" in free
        self.variables = frozenset(free - set(sandbox.globals) - OWN_VARIABLES - set(tokens))
        """The variables that a request may set."""

        self._probing = threading.Lock()
        self._known: Abilities | None = None

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
        """Renders the prompt's text, in which control tokens are aliases (control_tokens.py).

        It ends with the beginning of the assistant's message (`add_generation_prompt`), or inside the last message
        (`continue_final_message`). Raises InvalidRequest with `field`, and what `do` raises.
        """
        rendering = self.prepare(
            messages,
            tools,
            field=field,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return rendering.finish(lambda: self._do(rendering.job))

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        field: str = "messages",
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Does the part of `render` before the template runs. Raises as `render` does."""
        if not messages:
            raise InvalidRequest(f"{field} is empty; a chat has at least one message", field=field, code="empty_prompt")
        variables = dict(template_kwargs or {})
        self._check_variables(variables)
        controls = self.controls
        as_dicts = [tool.as_openai() for tool in tools]
        chat = _open_ended(messages, controls.end_mark, field) if continue_final_message else messages
        try:
            adapted_messages = adapted(chat, as_dicts, self._abilities, self._placeholders, field)
        except FAILURES as error:
            raise self._refusal(type(error).__name__, str(error), field) from None
        begins = add_generation_prompt and not continue_final_message
        variables |= {"tools": as_dicts or None, "add_generation_prompt": begins}
        marks_roles = self._abilities.marked_roles
        job = self._job(adapted_messages, variables, field, marks_roles=marks_roles)
        is_blank = continue_final_message and _is_blank(messages[-1])
        return Rendering(self, job, field, marks_roles=marks_roles, is_cut=continue_final_message, is_blank=is_blank)

    @property
    def is_probed(self) -> bool:
        """Whether the template's abilities are known; finding them out renders some test chats."""
        return self._known is not None

    def probe(self) -> None:
        """Finds out the template's abilities, so that the first chat need not wait for it. Raises what `do` raises, and
        InvalidRequest if a test chat takes the template to a limit."""
        _ = self._abilities

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name == "chat_template":
                raise InvalidRequest(
                    "requests cannot set a chat template; the operator sets --chat-template",
                    field="chat_template_kwargs",
                    code="chat_template_not_allowed",
                )
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise InvalidRequest(
                    f"chat_template_kwargs: this model's chat template has no variable {echo(name)}; it has: {known}",
                    field="chat_template_kwargs",
                )

    def _job(
        self, messages: Sequence[Message], variables: Mapping[str, Any], field: str, *, marks_roles: bool = False
    ) -> bytes:
        """Raises InvalidRequest."""
        values = {**self._tokens, "documents": None, **variables, "messages": list(messages)}
        try:
            return write_job(self._code, Variables(values, self.controls.role_mark if marks_roles else ""))
        except ValueError:
            raise self._refusal("RecursionError", "", field) from None

    def read(self, do: Callable[[], bytes], field: str) -> str:
        """Returns the rendering that the answer of `do` has. Raises InvalidRequest with the template's error."""
        try:
            return read_answer(do())
        except OverLimit as error:
            message = f"{field}: the chat template cannot render these: {error.message}; send less, or use another one"
            raise InvalidRequest(message, field=field, code=AT_LIMIT) from None
        except Failed as error:
            raise self._refusal(error.kind, str(error), field) from None

    def _refusal(self, kind: str, said: str, field: str) -> InvalidRequest:
        said = "too deeply nested" if kind == "RecursionError" else self.controls.plain(said)
        shown = "".join(ch if ch.isprintable() else " " for ch in said[:MAX_TOLD])
        message = f"{field}: the model's chat template rejects these messages: {shown or kind}"
        return InvalidRequest(message, field=field)

    # abilities of the template, found out by rendering test chats

    @property
    def _abilities(self) -> Abilities:
        if self._known is None:
            with self._probing:  # each template has its own lock: probing one can take long
                if self._known is None:
                    self._known = self._find_abilities()
        return self._known

    def _find_abilities(self) -> Abilities:
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
            call_texts=NEEDLE in self._tried_call(needle, f'["{NEEDLE}"'),
            short_ids=self._wants_short_ids(needle),
            marked_roles=self._wants_marked_roles(needle),
        )

    def _tried(self, *messages: Message, marks_roles: bool = False) -> str:
        """Renders a test chat; "" when the template fails. Raises InvalidRequest at a limit: more test chats would take
        as long again."""
        variables = {"tools": None, "add_generation_prompt": True}
        try:
            job = self._job(messages, variables, "messages", marks_roles=marks_roles)
            return self.read(lambda: self._do(job), "messages")
        except InvalidRequest as error:
            if error.code == AT_LIMIT:
                raise
            return ""

    def _tried_call(self, question: Any, arguments: Any) -> str:
        """Renders a question and a call with these arguments; "" when the template fails."""
        calls = [{"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return self._tried(
            {"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": calls}
        )

    def _wants_call_strings(self, content: Any) -> bool:
        of_object, text = self._tried_call(content, {NEEDLE: NEEDLE}), f'{{"{NEEDLE}": "{NEEDLE}"}}'
        return (not of_object or f"{{'{NEEDLE}'" in of_object) and text in self._tried_call(content, text)

    def _wants_short_ids(self, content: Any) -> bool:
        def takes(name: str) -> bool:
            calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": {}}}]
            assistant = {"role": "assistant", "content": "", "tool_calls": calls}
            result = {"role": "tool", "tool_call_id": name, "name": "f", "content": content}
            return bool(self._tried(_user(content), assistant, result))

        return self._knows_tools and takes("abcdef123") and not takes("call_0123456789abcdef01234567")

    def _wants_marked_roles(self, content: Any) -> bool:
        controls = self.controls

        chat: list[Message] = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
        spelled = controls.count_spelled(self._tried(*chat))
        if not spelled:
            return False
        left = controls.count_spelled(controls.join_roles(self._tried(*chat, marks_roles=True)))
        if left:
            log.warning("the chat template joins pieces to control tokens; they reach the model as plain text")
        return left < spelled


class Rendering:
    """A chat about to be rendered. `job`: what the template is to do, see template_jobs.py."""

    def __init__(
        self, template: ChatTemplate, job: bytes, field: str, *, marks_roles: bool, is_cut: bool, is_blank: bool
    ) -> None:
        """`is_cut`: the rendering ends inside the last message; `is_blank`: which has no text yet."""
        self._template = template
        self.job = job
        self._field = field
        self._marks_roles = marks_roles
        self._is_cut = is_cut
        self._is_blank = is_blank

    def finish(self, do: Callable[[], bytes]) -> str:
        """Returns the prompt's text. `do` returns the answer to the job. Raises as `ChatTemplate.render` does."""
        controls = self._template.controls
        text = self._template.read(do, self._field)
        if self._marks_roles:
            text = controls.join_roles(text)
        return _cut(text, controls.end_mark, self._field, is_blank=self._is_blank) if self._is_cut else text


class ChatTemplates(NamedTuple):
    """A server's chat templates."""

    plain: ChatTemplate
    with_tools: ChatTemplate
    controls: ControlTokens
    end_ids: tuple[int, ...] = ()  # tokens that end a turn, which the model's settings may not name
    stops: tuple[str, ...] = ()  # strings that do

    def of(self, tools: Sequence[Tool]) -> ChatTemplate:
        """Returns the template for a chat with these tools."""
        return self.with_tools if tools else self.plain


def check_chat_template(setting: str | None) -> None:
    """Raises StartupError when --chat-template has an unknown name, or a file that is missing or does not compile."""
    if setting is None or setting in BUILT_IN:
        return
    if not setting.endswith((SUFFIX, JSON_SUFFIX)):
        raise StartupError(
            f"--chat-template {echo(setting)}: there is no such template; use {', '.join(BUILT_IN)}, a {SUFFIX} or a "
            f"{JSON_SUFFIX} file",
            field="chat_template",
        )
    try:
        Sandbox().code_of(_read(setting).source, lambda tree: tree)
    except FAILURES as error:
        raise StartupError(f"--chat-template {setting}: {_line(error)}", field="chat_template") from None


def load_chat_templates(
    setting: str | None,
    tokenizer: Tokenizer,
    pictures: Mapping[str, tuple[str, int]],
    *,
    allow_spelled: bool = False,
    do: Callable[[bytes], bytes] = do_job,
) -> ChatTemplates | str:
    """Loads the server's templates; a str says why it has none.

    `setting`: --chat-template; `pictures`: image, video -> (placeholder, the id to encode it as); `allow_spelled`: text
    of clients may spell special tokens; `do`: see ChatTemplate. Raises StartupError.
    """
    sources = _sources(setting, tokenizer)
    if sources is None:
        return "this model has no chat template; the operator can set one with --chat-template, such as chatml"
    controls = ControlTokens(tokenizer, dict(pictures.values()), allow_spelled=allow_spelled)
    placeholders = {kind: text for kind, (text, _) in pictures.items()}
    plain, with_tools, stops = sources
    if plain.endswith(CHATML):
        stops = (END_OF_TURN,)
    ids = {stop: token_id for stop in stops if (token_id := tokenizer.token_id(stop)) is not None}
    try:
        templates = [
            ChatTemplate(source, controls, tokens=tokenizer.named_tokens, placeholders=placeholders, do=do)
            for source in dict.fromkeys((plain, with_tools or plain))
        ]
    except FAILURES as error:
        message = f"the model's chat template does not compile: {_line(error)}"
        log.warning("%s; chats get an error: set another template with --chat-template", message)
        return f"{message}; the operator can set another with --chat-template, such as chatml"
    unspelled = () if plain.endswith(CHATML) else tuple(stop for stop in stops if stop not in ids)
    return ChatTemplates(templates[0], templates[-1], controls, tuple(ids.values()), unspelled)


def _sources(setting: str | None, tokenizer: Tokenizer) -> tuple[str, str | None, tuple[str, ...]] | None:
    """Returns the template's source, that of another one for chats with tools, and what ends its answers; None = the
    model has no template."""
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("") == [tokenizer.bos_token_id]
    start = "{{ bos_token }}" if begins else ""
    if setting is not None and setting not in BUILT_IN:
        source, stops = _read(setting)
        return (start if setting.endswith(JSON_SUFFIX) else "") + source, None, stops
    if setting is None and tokenizer.chat_template is not None:
        return tokenizer.chat_template, tokenizer.tool_template, ()
    if setting is None and tokenizer.token_id("<|im_start|>") is None:
        return None
    return start + BUILT_IN[setting or "chatml"], None, ()


def _read(file: str) -> JsonTemplate:
    """Reads a template file, in Jinja or in JSON. Raises StartupError."""
    try:
        text = read_text(Path(file).expanduser())
        return read_json_template(text, file) if file.endswith(JSON_SUFFIX) else JsonTemplate(text, ())
    except FileNotFoundError:
        raise StartupError(f"--chat-template {file}: there is no such file", field="chat_template") from None
    except OSError as error:
        raise StartupError(f"--chat-template {file}: {error.strerror}", field="chat_template") from None
    except UnicodeDecodeError:
        raise StartupError(f"--chat-template {file}: is not UTF-8", field="chat_template") from None


def _free_names(tree: nodes.Template) -> set[str]:
    """Returns the variables that a template reads from outside; of those that it also sets, only the ones that it tests
    for being defined."""
    names = list(tree.find_all(nodes.Name))
    tests = [node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
    defaults = [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    tested = {node.node.name for node in (*tests, *defaults) if isinstance(node.node, nodes.Name)}
    set_here = {node.name for node in names if node.ctx != "load"}
    return meta.find_undeclared_variables(tree) - (set_here - tested)


def _line(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    text = "".join(ch if ch.isprintable() else " " for ch in (str(error) or type(error).__name__)[:MAX_TOLD])
    return text if line is None else f"{text} (line {line})"


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _open_ended(messages: Sequence[Message], mark: str, field: str) -> list[Message]:
    """Returns the messages with `mark` behind the last message's text, to cut the rendering there. Raises
    InvalidRequest when the last message cannot be continued."""
    last = messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or last.get("tool_calls"):
        got = f"has the role {last['role']}" if last["role"] != "assistant" else "has tool_calls"
        raise InvalidRequest(
            f"{field}: only an assistant message without tool_calls can be continued; the last message {got}",
            field=field,
        )
    mark += " "  # a space behind it shows whether the template trims the text
    if isinstance(content, str):
        content += mark
    elif isinstance(content, list) and content and content[-1]["type"] == "text":
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise InvalidRequest(f"{field}: the last message has no text at its end to continue", field=field)
    return [*messages[:-1], {**last, "content": content}]


def _is_blank(message: Message) -> bool:
    content = message.get("content") or ""
    return not (content if isinstance(content, str) else "".join(part.get("text", "") for part in content)).strip()


def _cut(rendering: str, mark: str, field: str, *, is_blank: bool) -> str:
    """Returns the rendering before `mark`, without the white space that ends the message's text if the template trims
    it. White space before a message without text (`is_blank`) is the template's own.

    Raises InvalidRequest when the template did not write the mark.
    """
    before, separator, after = rendering.rpartition(mark)
    if not separator:
        message = f"{field}: the model's chat template does not end with the last message's text"
        raise InvalidRequest(message, field=field)
    return before if is_blank or after.startswith(" ") else before.rstrip()
