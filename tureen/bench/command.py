"""The command line of `tureen bench`. Each workload is imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from tureen.bench.workloads import OVER_HTTP
from tureen.config import DEFAULT_MODEL, Config
from tureen.errors import InvalidRequest

BACKENDS = ("tureen", "sglang", "openai", "llamacpp")
DEFAULT_URLS = {
    "tureen": "http://127.0.0.1:30000",
    "sglang": "http://127.0.0.1:30000",
    "openai": "http://127.0.0.1:8000",
    "llamacpp": "http://127.0.0.1:8080",
}
DEFAULT_VOCAB = 49152  # of the default model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    server = parser.add_argument_group("what is measured")
    server.add_argument("--backend", choices=BACKENDS, default="tureen", help="kind of server [tureen]")
    server.add_argument("--url", help="where it listens [the default port of its kind on 127.0.0.1]")
    server.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME=BACKEND@URL",
        help="in place of --backend and --url; given several times, the servers take turns and are compared",
    )
    server.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="[NAME=]COMMAND",
        help="start the server with this command, measure its cold start, stop it at the end",
    )
    server.add_argument(
        "--pid", type=_positive, help="the server's process [the local process that listens on the port]"
    )
    server.add_argument("--api-key", help="sent as `Authorization: Bearer KEY`")
    server.add_argument("--vocab", type=_positive, metavar="N", help="size of the vocabulary [what the server says]")
    _add_load(parser)
    _add_own_share(parser)
    parser.add_argument("--wide", action="store_true", help="show all columns: maxima, processor time, memory, goodput")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the work")
    load.add_argument(
        "--workload",
        type=_workloads,
        default=["single"],
        metavar="NAME[,NAME…]",
        help=f"{', '.join(OVER_HTTP)}, offline, start, or all = all but these two [single]",
    )
    load.add_argument(
        "--cold",
        choices=("evict", "drop"),
        help="with --workload start: before each start, evict what the servers read from the page cache; drop: empty "
        "it, which needs root",
    )
    load.add_argument("--concurrency", type=_positive, metavar="N", help="N requests at a time [the workload's own]")
    load.add_argument("--rate", type=_positive_float, metavar="R", help="open loop: R Poisson arrivals a second")
    load.add_argument("--requests", type=_positive, metavar="N", help="how many [the workload's own]")
    load.add_argument("--rounds", type=_positive, metavar="N", help="passes over all targets [1; 2 with several]")
    load.add_argument(
        "--seed", type=int, help="of the prompts [random, reported; a repeated seed may find them cached]"
    )
    load.add_argument("--quick", action="store_true", help="a quarter of the output and of the requests")
    load.add_argument(
        "--goal-ttft-ms", type=_positive_float, default=2000.0, help="goodput: time to first token [2000]"
    )
    load.add_argument("--goal-itl-ms", type=_positive_float, default=200.0, help="goodput: mean time per token [200]")
    load.add_argument(
        "--model-path", help="of --workload offline and --step-shares; else its tokenizer [the default model]"
    )


def _add_own_share(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("tureen's own share, in this process, with a fake model except for the first")
    own.add_argument("--step-shares", action="store_true", help="native code, runner and engine in a decode step")
    own.add_argument("--engine-overhead", action="store_true", help="the engine's Python a step")
    own.add_argument("--http-overhead", action="store_true", help="latency that HTTP adds to a request")
    own.add_argument(
        "--growth", action="store_true", help="what one and two fronts, one and two replicas stream, in processes"
    )
    own.add_argument(
        "--masks",
        type=Path,
        metavar="CORPUS",
        help="what constraints cost: a folder or archive of JSON schemas, with the tokenizer of --model-path",
    )
    own.add_argument("--every", type=_positive, default=1, metavar="N", help="of --masks: every Nth schema [1]")
    own.add_argument("--processor-overhead", action="store_true", help="what a client's logit processor adds to a step")


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status. Raises TureenError when it cannot be done or a server answers
    wrongly."""
    if options.json is not None and not options.json.parent.is_dir():
        raise InvalidRequest(f"--json {options.json}: there is no such folder")
    if options.cold and options.workload != ["start"]:
        raise InvalidRequest(f"--cold {options.cold} is for --workload start, which measures starts")
    if options.growth:
        document = _growth()
    elif options.masks is not None:
        document = _masks(options)
    elif options.step_shares or options.engine_overhead or options.http_overhead or options.processor_overhead:
        document = _overhead(options)
    elif options.workload == ["offline"]:
        document = _offline(options)
    elif options.workload == ["start"]:
        document = _starts(options)
    else:
        document = _servers(options)
    if options.json is not None:
        machine = importlib.import_module("tureen.bench.machine").describe()
        options.json.write_text(json.dumps({"machine": machine} | document, indent=1) + "\n", encoding="utf-8")
        _show(f"written: {options.json}")
    return 0


def _overhead(options: argparse.Namespace) -> dict[str, Any]:
    overhead, build = (importlib.import_module(name) for name in ("tureen.bench.overhead", "tureen.build"))
    config = Config(model_path=options.model_path or DEFAULT_MODEL)
    tokenizer = build.find_model(config).tokenizer
    document: dict[str, Any] = {}
    if options.step_shares:
        steps = importlib.import_module("tureen.bench.steps")
        document["step_shares"] = msgspec.to_builtins(steps.step_shares(config))
    if options.engine_overhead:
        document["engine_overhead"] = msgspec.to_builtins(overhead.engine_overhead(tokenizer))
    if options.http_overhead:
        document["http_overhead"] = msgspec.to_builtins(overhead.http_overhead(tokenizer))
    if options.processor_overhead:
        processors = importlib.import_module("tureen.bench.processors")
        document["processor_overhead"] = msgspec.to_builtins(processors.processor_overhead())
    _show(json.dumps(document, indent=1))
    return document


def _growth() -> dict[str, Any]:
    growth = importlib.import_module("tureen.bench.growth")
    figures = growth.run_growth()
    _show(growth.table(figures))
    return {"growth": msgspec.to_builtins(figures)}


def _masks(options: argparse.Namespace) -> dict[str, Any]:
    masks, build = (importlib.import_module(name) for name in ("tureen.bench.masks", "tureen.build"))
    tokenizer = build.find_model(Config(model_path=options.model_path or DEFAULT_MODEL)).tokenizer
    figures = masks.run_masks(options.masks, tokenizer, options.every, _say)
    _show(masks.table(figures))
    return {"masks": msgspec.to_builtins(figures)}


def _offline(options: argparse.Namespace) -> dict[str, Any]:
    offline = importlib.import_module("tureen.bench.offline")
    results = offline.run_offline(
        model_path=options.model_path,
        vocab_size=options.vocab or DEFAULT_VOCAB,
        seed=options.seed,
        quick=options.quick,
        requests=options.requests,
    )
    results_json = [msgspec.to_builtins(result) for result in results]
    _show(json.dumps(results_json, indent=1))
    return {"offline": results_json}


def _servers(options: argparse.Namespace) -> dict[str, Any]:
    names = ("session", "report", "structured")
    session, report, structured = (importlib.import_module(f"tureen.bench.{name}") for name in names)
    for alone in ("offline", "start"):
        if alone in options.workload:
            raise InvalidRequest(f"--workload {alone} runs alone")
    plan = _plan(options)
    targets = plan.targets
    outcome = session.run_plan(plan, _say)
    _show(report.table(outcome.results, is_wide=options.wide))
    if "json" in options.workload:
        _show("\n" + structured.table(outcome.results))
    if len(targets) > 1:
        _show("\n" + report.ratios(outcome.results, [target.name for target in targets]))
    if outcome.cold_starts:
        _show("\n" + report.cold_starts(outcome.cold_starts))
    outcome_json: dict[str, Any] = msgspec.to_builtins(outcome)
    return outcome_json


def _starts(options: argparse.Namespace) -> dict[str, Any]:
    starts = importlib.import_module("tureen.bench.starts")
    starts_made = starts.run_starts(_plan(options), options.cold, _say)
    _show(starts.table(starts_made))
    return {"cold": options.cold, "starts": msgspec.to_builtins(starts_made)}


def _plan(options: argparse.Namespace) -> Any:
    session, report = (importlib.import_module(f"tureen.bench.{name}") for name in ("session", "report"))
    targets = [session.TargetSpec(**spec) for spec in target_specs(options)]
    return session.BenchPlan(
        targets=targets,
        workloads=options.workload,
        rounds=options.rounds or (2 if len(targets) > 1 else 1),
        concurrency=options.concurrency,
        requests=options.requests,
        rate=options.rate,
        seed=options.seed,
        vocab_size=options.vocab,
        quick=options.quick,
        api_key=options.api_key,
        goals=report.Goals(options.goal_ttft_ms, options.goal_itl_ms),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - what the command is doing


def target_specs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns name, backend, url, start and pid of every server. Raises InvalidRequest naming the flag at fault."""
    if options.target and options.url:
        raise InvalidRequest("--target says the URL already: leave --url out")
    texts = options.target or [f"{options.backend}={options.backend}@{options.url or DEFAULT_URLS[options.backend]}"]
    specs = [_target(text) for text in texts]
    by_name = {spec["name"]: spec for spec in specs}
    if len(by_name) < len(specs):
        raise InvalidRequest("--target: every server needs its own name")
    if options.pid is not None:
        if len(specs) > 1:
            raise InvalidRequest("--pid is for one server; with several they are found by their ports")
        specs[0]["pid"] = options.pid
    for text in options.start:
        name, equals, command = text.partition("=")
        if not (equals and name in by_name):
            if len(specs) > 1:
                raise InvalidRequest(
                    f"--start {text}: with several targets it begins with NAME=, one of {', '.join(by_name)}"
                )
            name, command = specs[0]["name"], text
        by_name[name]["start"] = command
    return specs


def _target(text: str) -> dict[str, Any]:
    name, _, rest = text.partition("=")
    backend, _, url = rest.partition("@")
    if not name or not url:
        raise InvalidRequest(f"--target {text}: must be NAME=BACKEND@URL, such as ours=tureen@http://127.0.0.1:30000")
    if backend not in BACKENDS:
        raise InvalidRequest(f"--target {text}: the backend must be one of {', '.join(BACKENDS)}")
    return {"name": name, "backend": backend, "url": url}


def _workloads(text: str) -> list[str]:
    names = list(OVER_HTTP) if text == "all" else text.split(",")
    for name in names:
        if name not in (*OVER_HTTP, "offline", "start"):
            raise argparse.ArgumentTypeError(
                f"unknown workload '{name}'; there are {', '.join(OVER_HTTP)}, offline, start, all"
            )
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def _show(text: str) -> None:
    print(text)  # noqa: T201 - what the command is for
