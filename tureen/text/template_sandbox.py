"""Extends jinja2's sandbox for chat templates, with limits on the CPU time and the memory of a rendering.

Templates get what transformers' `apply_chat_template` offers: `trim_blocks`, `lstrip_blocks`, loop controls,
`generation` blocks, `raise_exception`, `strftime_now` and a `tojson` that does not escape for HTML.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial, wraps
from types import CodeType
from typing import Any, Final

from jinja2 import Environment, Template, nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LIMIT_S: Final = 1.0  # CPU time of a rendering
MAX_SOURCE_CHARS: Final = 1 << 18  # of a template; the largest real ones have some 30,000
MAX_CHARS: Final = 1 << 24  # characters of one string and of the rendering; nodes of a value that becomes text
MAX_TOTAL_CHARS: Final = 1 << 29  # characters of all strings that a rendering makes, intermediate ones too
MAX_BITS: Final = 4096  # bits of an integer

STR_METHODS: Final = _words(
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier "
    "islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix "
    "replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)
"""Methods of strings that templates may call. The others make long strings of short ones, such as ljust and
translate."""
NO_FILTERS: Final = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")
SEQUENCE_FILTERS: Final = _words(
    "attr batch count d default dictsort first groupby items join last length list map max min reject rejectattr "
    "reverse select selectattr slice sort sum unique"
)
"""Filters that do not convert their input to text, so its size need not be checked."""
WIDE: Final = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|:[^{}]*(\d{5}|\{)")
"""A format string with a width that is large, or that is itself a value."""
MAX_COUNT: Final = 100_000  # largest number that the filters batch, slice, round and truncate take


class Role(str):
    """A message's role. It equals its text, but is written with a mark, so that a control token that the template
    builds around it, such as `'<|' + role + '|>'`, is known to be the template's own."""

    __slots__ = ("marked",)
    marked: str

    @classmethod
    def marked_with(cls, mark: str, name: str) -> Role:
        """Returns the role `name`, written with this mark before it."""
        role = cls(name)
        role.marked = mark + name
        return role

    def __str__(self) -> str:
        return self.marked

    def __add__(self, other: str) -> str:
        return self.marked + other

    def __radd__(self, other: str) -> str:
        return other + self.marked

    def __format__(self, spec: str) -> str:
        return format(self.marked, spec)


class OverLimit(TemplateError):
    """A rendering takes too much time or memory."""


class _Meter(threading.local):
    """The CPU time and the characters that the rendering on this thread may still use."""

    deadline_s = float("inf")  # by the thread's CPU clock
    chars_left = MAX_TOTAL_CHARS
    now: datetime | None = None  # what templates take for the local time; None = what it is


METER: Final = _Meter()


class GenerationTag(Extension):
    """Parses `{% generation %}` … `{% endgeneration %}`, which marks text for training, as a plain scope."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class SafeNamespace(Namespace):
    """A namespace without attributes that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


class _Metered(NodeTransformer):
    """Rewrites a template so that loops and concatenations go through filters that check the limits."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_each", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concat", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment without access to Python's internals, which stops renderings that take too much."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], finalize=_check_tree
        )
        self.concat = _concat  # type: ignore[method-assign]
        own_filters = {"_each": _each, "_concat": _concat, "tojson": _to_json, "join": _join_filter}
        own_filters |= {"indent": _indent, "replace": _replace, "format": _format_filter}
        default_filters = {name: function for name, function in self.filters.items() if name not in NO_FILTERS}
        self.filters = {name: _metered(name, function) for name, function in (default_filters | own_filters).items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": SafeNamespace,
        }

    def code_of(self, source: str, rewrite: Callable[[nodes.Template], nodes.Node]) -> CodeType:
        """Compiles a template; `rewrite` may change its parsed form first. Raises TemplateError, RecursionError."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"it has {len(source)} characters; a template has at most {MAX_SOURCE_CHARS}")
        tree = _Metered().visit(rewrite(self.parse(source)))
        code: CodeType = self.compile(tree)
        return code

    def render(self, template: Template, variables: dict[str, Any], *, now: datetime | None = None) -> str:
        """Renders a template within the limits. Raises OverLimit, and any exception that a template can raise.

        The limits hold between operations; a single one, such as a comparison of shared lists, can still take for
        ever. `now`: the local time for the template; None = what it is.
        """
        METER.deadline_s, METER.chars_left, METER.now = time.thread_time() + LIMIT_S, MAX_TOTAL_CHARS, now
        try:
            return template.render(variables)
        finally:
            METER.deadline_s = float("inf")

    # What follows overrides jinja2's hooks, each of which checks the limits before or after it does its work.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STR_METHODS
        return not isinstance(obj, (int, float, bytes)) and super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _tick()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in ("replace", "join"):
            __obj = partial(_replace if name == "replace" else _join, owner)
        return _spent(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return _spent(_percent(left, right))
        _check_operands(operator, left, right)
        return _spent(super().call_binop(context, operator, left, right))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        _tick()  # the filter `map` calls a filter for each item
        return super().call_filter(name, *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        _tick()
        return super().call_test(name, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            form: str = value.__self__
            _check_form(form, form.count("{"), (args, kwargs))
            return wrapped(*args, **kwargs)

        return bounded


def _tick() -> None:
    """Raises OverLimit when the rendering has used up its CPU time."""
    if time.thread_time() > METER.deadline_s:
        raise OverLimit(f"it takes more than {LIMIT_S:g} s of CPU time")


def _spent(value: Any) -> Any:
    """Returns the value, and counts a string or a list towards MAX_TOTAL_CHARS. Raises OverLimit."""
    _tick()
    if isinstance(value, (str, list, tuple)):
        _check_chars(len(value))
        METER.chars_left -= len(value)
        if METER.chars_left < 0:
            raise OverLimit("it makes too much text on its way")
    return value


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise OverLimit(f"it makes a text or a list longer than {MAX_CHARS}")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises OverLimit for a result that would be too large."""
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_chars(len(left) + len(right))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                _check_chars(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
        if operator in ("*", "**") and bits > MAX_BITS:
            raise OverLimit("it makes a number that is too large")


def _check_tree(value: Any) -> Any:
    """Returns a value that will become text. Raises OverLimit when the text would be too long, counting a shared
    part as often as it occurs."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    left, stack = MAX_CHARS, [value]
    while stack:
        _tick()
        container = stack.pop()
        for item in (*container, *container.values()) if isinstance(container, dict) else container:
            left -= len(item) if isinstance(item, str) else 1
            if isinstance(item, (list, tuple, dict)):
                stack.append(item)
        if left < 0:
            raise OverLimit(f"it makes a text longer than {MAX_CHARS}")
    return value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter so that it checks the limits; keeps its attributes, by which jinja2 passes it an environment."""
    makes_text = name not in SEQUENCE_FILTERS and not name.startswith("_")

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        if makes_text:
            for argument in args[:2]:
                _check_tree(argument)
        _check_arguments(name, args[1:], kwargs)
        return _spent(function(*args, **kwargs))

    return metered


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks the arguments of a filter. Raises OverLimit."""
    values = (*args, *kwargs.values())
    if name in ("batch", "slice", "round", "truncate") and any(
        isinstance(value, int) and value > MAX_COUNT for value in values
    ):
        raise OverLimit(f"the filter {name} has a number larger than {MAX_COUNT}")
    start = kwargs.get("start", args[2] if len(args) > 2 else 0)
    if name == "sum" and not isinstance(start, (int, float)):
        raise OverLimit("the filter sum is for numbers")


def _each(items: Iterable[Any]) -> Iterable[Any]:
    """Returns the items of a loop. It is a filter, so each loop is metered: nested loops are how templates take
    long."""
    return items


def _concat(items: Iterable[Any]) -> str:
    texts: list[str] = []
    size = 0
    for item in items:
        text = item if isinstance(item, str) and type(item) is str else str(_check_tree(item))
        size += len(text)
        _check_chars(size)
        texts.append(text)
    return "".join(texts)


def _join(separator: str, items: Iterable[str]) -> str:
    texts = list(items)
    _check_chars(len(separator) * len(texts) + sum(len(text) for text in texts))
    return separator.join(texts)


@pass_environment
def _join_filter(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return _join(str(d), [str(_check_tree(item)) for item in items])


def _format_filter(form: Any, *args: Any, **named: Any) -> str:
    return _percent(str(form), named or args)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_chars(len(text) + text.count(old) * len(new))
    result: str = text.replace(old, new, -1 if count is None else count)
    return result


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(text)
    _check_chars(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else max(width, 0)))
    return do_indent(text, width, first, blank)


def _percent(form: str, values: Any) -> str:
    _check_form(form, form.count("%"), values)
    text: str = form % values
    return text


def _check_form(form: str, num_places: int, values: Any) -> None:
    """Raises OverLimit for a format whose result could be too long: each place may take all of the values."""
    if WIDE.search(form):
        raise OverLimit("it formats to a large or variable width")
    _check_chars(len(form) + num_places * len(str(_check_tree(values))))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 16:
        raise OverLimit("tojson indents by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_chars(len(form) << 16)
    return (METER.now or datetime.now()).strftime(form)
