"""Whether a finished output fits its constraint, judged by libraries that had no part in making it.

Run as a program, this module is a fork server whose workers judge: a client's schema or pattern can make any judge
compute for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import jsonschema_rs
import msgspec
import regex

from tureen.errors import echo, excerpt
from tureen.grammar import GrammarError, GrammarSpec
from tureen.grammar.schema.document import Document
from tureen.grammar.schema.drafts import Draft, declared
from tureen.grammar.schema.meta_schemas import SITE, resources
from tureen.grammar_service.judged_patterns import with_judged_patterns
from tureen.sandbox import fork_server
from tureen.sandbox.fork_server import Program
from tureen.sandbox.limits import WorkerLimits
from tureen.sandbox.supervisor import Supervisor
from tureen.sandbox.worker import Lost, Worker

PROGRAM = "tureen.grammar_service.check"
ANY_JSON = "$$ANY$$"

REGEX_TIMEOUT_S = 0.2
CHECK_TIMEOUT_S = 1.0
START_TIMEOUT_S = 20.0
MAX_WAIT_S = 2.0  # for the checks of other outputs
SLOW_KEEP_S = 60.0  # for this long, a constraint that no judge finished is not judged again
MAX_SLOW = 64  # such constraints that are remembered
LIMITS = WorkerLimits(memory_bytes=512 << 20, cpu_s=30, is_sealed=True)
"""The limits of a judge. The limit on its processor time ends a judge that its user has left."""

MAX_VALIDATORS = 32
MAX_ATTEMPTS = 3  # where the judge is ended from outside, or the process that forks it

ASKS_UNICODE = re.compile(r"\(\?[a-z]*u[a-z]*\)")  # everywhere; a group may ask for itself
IGNORES_CASE = re.compile(r"\(\?[a-z]*i")

FAILED_JUDGES = (
    jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded,
    jsonschema_rs.ValidationErrorKind.RegexEngineFailure,
    jsonschema_rs.ValidationErrorKind.Referencing,
)
"""Errors that the library reports of the value, and that are none."""

ANNOTATIONS = (jsonschema_rs.ValidationErrorKind.ContentEncoding, jsonschema_rs.ValidationErrorKind.ContentMediaType)
"""It reports these errors of keywords that need not be kept."""

VALIDATORS: dict[Draft, Callable[..., jsonschema_rs.Validator]] = {
    "draft-04": jsonschema_rs.Draft4Validator,
    "draft-06": jsonschema_rs.Draft6Validator,
    "draft-07": jsonschema_rs.Draft7Validator,
    "2019-09": jsonschema_rs.Draft201909Validator,
    "2020-12": jsonschema_rs.Draft202012Validator,
}


class Unverified(Exception):
    """It cannot be told whether the output fits."""


class CheckVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The verdict on an output. Where it is not verified, the complaint is the reason."""

    complaint: str | None
    is_verified: bool = True


BUSY = CheckVerdict("others are judged", is_verified=False)


def check(spec: GrammarSpec, text: str) -> str | None:
    """Returns what in a finished output does not fit; None when all does, or where no independent judge exists.

    It names places and keywords, with pieces of the output: it is not for logs. Raises Unverified. Takes any time and
    memory that a schema asks for: `Checker` bounds it.
    """
    if spec.kind in ("ebnf", "structural_tag"):
        return None
    _, marker, rest = text.partition(spec.after) if spec.after else ("", "", text)
    if marker != spec.after:
        return f"the text never says {echo(spec.after)}"
    if spec.kind == "json_schema":
        return _check_json(spec.text, rest)
    if spec.kind == "regex":
        return _check_regex(spec, rest)
    return None if rest in json.loads(spec.text) else f"{echo(rest)} is not one of the choices"


def _check_regex(spec: GrammarSpec, text: str) -> str | None:
    is_ascii = not (spec.unicode_classes or ASKS_UNICODE.search(spec.text))
    patterns = [f"(?a){spec.text}"] if is_ascii else [spec.text]
    if is_ascii and IGNORES_CASE.search(spec.text):  # (?a) ignores it for the letters of ASCII only
        patterns.append(spec.text)
    try:
        fits = any(regex.fullmatch(pattern, text, timeout=REGEX_TIMEOUT_S) for pattern in patterns)
    except (regex.error, TimeoutError, RecursionError) as error:
        raise Unverified(f"the pattern could not be matched: {type(error).__name__}") from None
    if fits or any(_matches(pattern, text) for pattern in patterns):
        return None
    return f"{echo(text)} does not match the pattern"


def _matches(pattern: str, text: str) -> bool:
    r"""Asks Python's own `re`, which the mask follows: words and spaces (`\w`, `\s`, `\b`) are others in `regex`."""
    try:
        return re.fullmatch(pattern, text) is not None
    except (re.error, RecursionError):  # what only `regex` has
        return False


def _check_json(schema: str, text: str) -> str | None:
    try:
        values = _read(text)
    except RecursionError:
        raise Unverified("it is nested too deeply to be read") from None
    except ArithmeticError:
        raise Unverified("it holds a number that is too large to be read") from None
    except json.JSONDecodeError as error:
        return f"it is not JSON: {error.msg} at character {error.pos}"
    except ValueError as error:
        return f"it is not JSON: {error}"
    if schema == ANY_JSON:
        return None
    try:
        validator = _validator(schema)
    except (ValueError, GrammarError, RecursionError) as error:  # a ValidationError too is one
        raise Unverified(f"the schema could not be used: {type(error).__name__}") from None
    return next((complaint for value in values if (complaint := _complaint(validator, value))), None)


def _read(text: str) -> list[Any]:
    """The value; where a key comes twice, as readers read it that keep the last, and as those that keep the first.

    Raises RecursionError, ArithmeticError, ValueError.
    """
    has_twice = False

    def keep_last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal has_twice
        value = dict(pairs)
        has_twice = has_twice or len(value) < len(pairs)
        return value

    def keep_first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(reversed(pairs))

    load = functools.partial(json.loads, text, parse_float=Decimal, parse_constant=_refuse)
    last = load(object_pairs_hook=keep_last)
    return [last, load(object_pairs_hook=keep_first)] if has_twice else [last]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


@functools.lru_cache(MAX_VALIDATORS)
def _validator(schema: str) -> jsonschema_rs.Validator:
    """Judges by the draft that the schema names. What names none, or is not as its draft has it, is judged as it is
    meant. Raises ValueError."""
    draft = declared(json.loads(schema))
    registry = _meta_schemas() if SITE in schema else None
    if draft is not None:
        with contextlib.suppress(ValueError):
            return _made(VALIDATORS[draft], json.loads(schema), registry)
    return _made(jsonschema_rs.Draft202012Validator, Document(json.loads(schema)).modern(), registry)


@functools.cache
def _meta_schemas() -> jsonschema_rs.Registry:
    return jsonschema_rs.Registry(resources())


def _made(
    validator: Callable[..., jsonschema_rs.Validator], schema: Any, registry: jsonschema_rs.Registry | None
) -> jsonschema_rs.Validator:
    return validator(
        with_judged_patterns(schema),
        validate_formats=True,
        registry=registry,
        offline=True,  # it would fetch what $ref and $schema name, over the network and from files
        pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=1 << 40),  # past it a value counts as wrong
    )


def _complaint(validator: jsonschema_rs.Validator, value: Any) -> str | None:
    try:
        for error in validator.iter_errors(value):
            if isinstance(error.kind, FAILED_JUDGES):
                raise Unverified(f"the schema could not be used: {error.kind.name}")
            if not isinstance(error.kind, ANNOTATIONS):
                place = "".join(f"[{step!r}]" for step in error.instance_path)
                return f"the value{excerpt(place)} does not fit {echo(error.kind.name)}"
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair"
    except (ValueError, RecursionError) as error:
        raise Unverified(f"the value could not be judged: {type(error).__name__}") from None
    return None


def program(_: bytes) -> Program:
    """Returns the program of a worker that judges one output a message."""
    sys.set_int_max_str_digits(0)
    warnings.simplefilter("ignore")
    _meta_schemas()  # the worker may open no file
    decoder = msgspec.msgpack.Decoder(tuple[GrammarSpec, str])
    return Program(LIMITS, lambda _: lambda message: msgspec.msgpack.encode(_judge(*decoder.decode(message))))


def _judge(spec: GrammarSpec, text: str) -> CheckVerdict:
    try:
        return CheckVerdict(check(spec, text))
    except Unverified as error:
        return CheckVerdict(str(error), is_verified=False)
    except BaseException as error:  # noqa: BLE001 (a Rust library's panic is no Exception)
        return CheckVerdict(type(error).__name__, is_verified=False)


class Checker:
    """Checks in another process, for at most `CHECK_TIMEOUT_S`. Any thread may call it; calls wait for each other.

    A check that times out takes its time once, not for each output of its constraint, because other calls wait.
    """

    def __init__(self) -> None:
        """Does not wait until the process runs."""
        self._lock = threading.Lock()
        self._turns = ThreadPoolExecutor(1, "check-grammar")
        self._slow: dict[GrammarSpec, float] = {}  # until when they are not judged
        self._is_closed = False
        self._worker: Worker | None = None
        self.unverified = 0  # outputs that could not be judged
        self.supervisor = Supervisor("the workers that check outputs", PROGRAM, LIMITS)
        self.supervisor.start()

    def check(self, spec: GrammarSpec, text: str) -> CheckVerdict:
        """Returns what does not fit. Where that cannot be told in time, it is counted."""
        if not self._lock.acquire(timeout=MAX_WAIT_S):
            self.unverified += 1
            return BUSY
        try:
            verdict = self._ask(spec, text)
            self.unverified += not verdict.is_verified
            return verdict
        finally:
            self._lock.release()

    async def check_in_turn(self, spec: GrammarSpec, text: str) -> CheckVerdict:
        """The same for an event loop, which goes on, and for a limited time, so that no answer is delayed by other
        requests' constraints."""
        try:
            turn = self._turns.submit(self.check, spec, text)
        except RuntimeError:  # it is closed, or the system starts no thread
            self.unverified += 1
            return CheckVerdict("there is no thread for it", is_verified=False)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(turn), MAX_WAIT_S + CHECK_TIMEOUT_S)
        except TimeoutError:
            self.unverified += turn.cancel()  # one that has begun counts itself
            return BUSY

    def close(self) -> None:
        """End the processes."""
        self._turns.shutdown(wait=False, cancel_futures=True)
        self._is_closed = True
        self.supervisor.close()
        with self._lock:
            self._end_worker()

    def _ask(self, spec: GrammarSpec, text: str) -> CheckVerdict:
        if self._is_closed:
            return CheckVerdict("closed", is_verified=False)
        if self._slow.get(spec, 0.0) > time.monotonic():
            return CheckVerdict("it took too long before", is_verified=False)
        message = msgspec.msgpack.encode((spec, text))
        for _ in range(MAX_ATTEMPTS):
            try:
                answer = self._ready_worker().call(message, timeout_s=CHECK_TIMEOUT_S)
                return msgspec.msgpack.decode(answer, type=CheckVerdict)
            except Lost as lost:
                self._end_worker()
                if lost.is_outside or lost.is_blameless:
                    continue
                if lost.has_begun and lost.is_late:
                    self._remember_slow(spec)
            except msgspec.DecodeError:
                self._end_worker()
            break
        return CheckVerdict("it took too long, or too much memory", is_verified=False)

    def _ready_worker(self) -> Worker:
        """The one that there is, where it still runs, or a new one. Raises Lost."""
        if self._worker is not None and not self._worker.is_alive:
            self._end_worker()
        if self._worker is None:
            if not self.supervisor.wait_ready(START_TIMEOUT_S):
                raise Lost("no worker could be started")
            self._worker = self.supervisor.fork()
            self._worker.begin(time.monotonic() + START_TIMEOUT_S)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self.supervisor.end(self._worker)
            self._worker = None

    def _remember_slow(self, spec: GrammarSpec) -> None:
        self._slow.pop(spec, None)
        self._slow[spec] = time.monotonic() + SLOW_KEEP_S
        if len(self._slow) > MAX_SLOW:
            del self._slow[next(iter(self._slow))]


if __name__ == "__main__":
    fork_server.main(program)
