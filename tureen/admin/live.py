"""Says what the page of /status shows: the figures of /metrics, the last ten minutes, requests and prefix cache. It is
imported when somebody looks for the first time."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request

from tureen import __version__
from tureen.admin.replica_routes import replica_report
from tureen.admin.server_routes import update_gauges
from tureen.clients.quotas import Tally
from tureen.contract.types import EngineHealth, EngineStats
from tureen.errors import InvalidRequest, TureenError, echo
from tureen.fields.body import refuse_unknown
from tureen.http.call import call_of
from tureen.metrics import SAMPLE_S, Sample
from tureen.requests.state import Common, ServerState

ANSWER_S = 1.0
"""Time that a busy engine has to tell of its cache; after that the rest is sent without."""
FRESH_S = 0.8
"""Age to which what an engine told is sent again: many who look ask it no more often than one."""
MOST_REQUESTS = 200
MOVED = re.compile(r"~[0-9]+$")
"""End of a request's id in a replica that it was moved to."""


class Observable(Protocol):
    """One engine, alone or as a replica."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def health(self) -> EngineHealth: ...

    async def call(self, op: str, **args: Any) -> object: ...


class Told(NamedTuple):
    """The answer of an engine, and when it was asked, in seconds of the monotonic clock."""

    asked_s: float
    overview: dict[str, Any] | None


_told: WeakKeyDictionary[Observable, Told] = WeakKeyDictionary()


async def _overview(engine: Observable) -> dict[str, Any] | None:
    """Returns `Control.overview` of an engine; None where it has no time, or has ended."""
    if engine.health.state != "healthy":
        return None
    told = _told.get(engine)
    if told is None or time.monotonic() - told.asked_s > FRESH_S:
        _told[engine] = told = Told(time.monotonic(), None if told is None else told.overview)  # who else looks now
        overview = None
        with contextlib.suppress(TureenError, TimeoutError):
            overview = cast("dict[str, Any]", await asyncio.wait_for(engine.call("overview"), ANSWER_S))
        _told[engine] = told = Told(told.asked_s, overview)
    return told.overview


async def live_report(request: Request, state: ServerState) -> dict[str, Any]:
    """Returns what `/status/live` answers."""
    call, after = call_of(request.scope), _read(request)
    is_admin = call.admin_refusal is None
    owner = None if is_admin else call.client_name
    models = await asyncio.gather(*(_model(each, after, owner) for each in state.common.states))
    return {
        "version": __version__,
        "uptime_s": round(time.monotonic() - state.common.started_s, 1),
        "interval_s": SAMPLE_S,
        "is_admin": is_admin,
        "helpers_down": sorted({name for each in state.common.states for name in each.helpers_down}),
        "sample_fields": Sample._fields,
        "models": models,
    }


CSV_HEAD = ("day", "client", *Tally.__struct_fields__)


async def usage_report(common: Common) -> dict[str, Any]:
    """Returns what each client used, those that used most first."""
    clients = [{"client": name, **msgspec.structs.asdict(tally)} for name, tally in common.quotas.tallies.items()]
    clients.sort(key=lambda each: -(each["prompt_tokens"] + each["output_tokens"]))
    kept = common.use is not None
    return {"kept": kept, "unwritten_requests": common.use.num_unwritten if common.use else None, "clients": clients}


async def usage_csv(common: Common) -> str:
    """Returns what each client used on each day, as CSV; without --usage-db since the start, with no day."""
    days: Sequence[tuple[Any, ...]] = (
        [("", name, *msgspec.structs.astuple(tally)) for name, tally in common.quotas.tallies.items()]
        if common.use is None
        else await common.use.days()
    )
    text = io.StringIO()
    csv.writer(text).writerows([CSV_HEAD, *days])
    return text.getvalue()


def _read(request: Request) -> int:
    """Returns `after` of a query. Raises InvalidRequest."""
    sent = dict(request.query_params)
    refuse_unknown(sent, ("after",))
    after = sent.get("after", "0")
    if not re.fullmatch("[0-9]{1,15}", after):
        raise InvalidRequest(f"after must be the number of a sample, at least 0, got {echo(after)}", field="after")
    return int(after)


async def _model(state: ServerState, after: int, owner: str | None) -> dict[str, Any]:
    """Returns what is shown of one model to `owner`; None = an operator, who sees all requests and the cache."""
    update_gauges(state)
    engines: list[Observable] = list(state.client.replicas) or [state.client]
    told = await asyncio.gather(*map(_overview, engines))
    named = [name for each in told if each is not None for name in each["waiting"]]
    waiting = {*named, *(MOVED.sub("", name) for name in named)}
    requests = sorted(_requests(state, waiting, owner), key=lambda each: -each["age_s"])
    health = state.client.health
    return {
        "name": state.context.info.model_name,
        "engine": {"state": health.state, "reason": health.reason},
        "figures": state.metrics.figures(),
        "samples": [sample for sample in state.metrics.history.samples if sample.number > after],
        "requests": requests[:MOST_REQUESTS],
        "num_requests": len(requests),
        "engines": [
            _engine(engine, each if owner is None else None) for engine, each in zip(engines, told, strict=True)
        ],
        "replicas": [replica_report(replica) for replica in state.client.replicas],
        "page_size": state.context.info.page_size,
    }


def _engine(engine: Observable, told: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the pages of one engine's KV cache, and the branches of its prefix cache for those who may see them."""
    stats = engine.stats
    return {
        "state": engine.health.state,
        "pages": {
            "used": stats.num_used_pages,
            "cached": stats.num_cached_pages,
            "free": stats.num_free_pages,
        },
        "branches": None if told is None else told["branches"],
        "num_left_out": None if told is None else told["num_left_out"],
    }


def _requests(state: ServerState, waiting: set[str], owner: str | None) -> Iterator[dict[str, Any]]:
    """Yields the requests of a model that have not ended, of one client or, None, of all; an operator sees whose they
    are, and by which name they can be aborted."""
    now_s = time.monotonic()
    for run, of in state.common.runs.items():
        if of is not state or owner not in (None, run.owner):
            continue
        for output in run.outputs:
            meter = run.meters.get(output.index)
            if meter is None or output.finish is not None:
                continue
            age_s = now_s - output.started_s
            first_s = None if meter.first_s is None else meter.first_s - output.started_s
            writing_s = age_s - (first_s or 0.0)
            yield {
                "state": _standing(first_s, is_waiting=output.request.id in waiting),
                "age_s": round(age_s, 3),
                "ttft_s": None if first_s is None else round(first_s, 3),
                "prompt_tokens": len(output.request.token_ids),
                "output_tokens": meter.num_tokens,
                "tokens_per_s": round((meter.num_tokens - 1) / writing_s, 1) if meter.num_tokens > 1 else None,
                **({"client": run.owner, "rid": output.rid[:64]} if owner is None else {}),
            }


def _standing(first_s: float | None, *, is_waiting: bool) -> str:
    if is_waiting:
        return "waiting"
    return "starting" if first_s is None else "writing"
