"""tureen's own share can be measured, mostly without a model. How large it is, is not for a test to say."""

import contextlib

import msgspec
import pytest
from byte_tokenizer import make_byte_tokenizer
from work import counted

from tureen.bench import growth, overhead, processors, steps
from tureen.config import Config


def test_the_shares_of_the_engine_of_http_and_of_a_jail_are_measured_against_the_same_work_without_them(monkeypatch):
    the_engines_share_is_measured_at_every_number_of_sequences(monkeypatch)
    the_share_of_http_is_measured_against_the_same_request_without_it(monkeypatch)
    a_request_over_http_is_more_work_than_the_same_request_without_it(monkeypatch)
    the_share_of_a_jailed_processor_is_measured_against_the_same_step_without_it(monkeypatch)


def the_engines_share_is_measured_at_every_number_of_sequences(monkeypatch):
    monkeypatch.setattr(overhead, "STEPS", 5)
    found = overhead.engine_overhead(make_byte_tokenizer())
    assert [entry.running for entry in found] == [1, 16, 64]
    assert all(0 < entry.step_ms.p50 <= entry.step_ms.max for entry in found)


def the_share_of_http_is_measured_against_the_same_request_without_it(monkeypatch):
    monkeypatch.setattr(overhead, "REQUESTS", 5)
    monkeypatch.setattr(overhead, "WARM_UP", 1)
    found = overhead.http_overhead(make_byte_tokenizer())
    for spread in (found.http_ms, found.direct_ms):
        assert 0 < spread.p50 <= spread.p99 <= spread.max
    assert found.added_p50_ms == pytest.approx(found.http_ms.p50 - found.direct_ms.p50, abs=0.0011)


def a_request_over_http_is_more_work_than_the_same_request_without_it(monkeypatch):
    """By the calls and lines of Python that run in the event loop, in place of the time that they take here."""

    async def work_of(ask):
        with counted() as work:
            await ask()
        return float(work.on_loop)

    monkeypatch.setattr(overhead, "REQUESTS", 3)
    monkeypatch.setattr(overhead, "WARM_UP", 1)
    with monkeypatch.context() as patch:
        patch.setattr(overhead, "_timed", work_of)
        found = overhead.http_overhead(make_byte_tokenizer())
    assert found.http_ms.p50 > 2 * found.direct_ms.p50 > 0


def the_share_of_a_jailed_processor_is_measured_against_the_same_step_without_it(monkeypatch):
    monkeypatch.setattr(processors, "STEPS", 5)
    found = processors.processor_overhead()
    assert [entry.processor for entry in found] == list(processors.CLASSES)
    assert all(entry.with_ms.p50 > 0 < entry.without_ms.p50 for entry in found)


@pytest.mark.model
def test_the_parts_of_a_step_of_the_real_model_add_up_to_it(default_model_source, monkeypatch):
    pytest.importorskip("tureen.kernels.cpu._native")
    monkeypatch.setattr(steps, "STEPS", 3)
    monkeypatch.setattr(steps, "RUNNING", (1, 2))
    found = steps.step_shares(Config(max_total_tokens=4096))
    assert [entry.running for entry in found] == [1, 2]
    for entry in found:
        assert 0 < entry.forward_ms.p50 < entry.step_ms.p50
        assert min(entry.engine_ms.p50, entry.runner_ms.p50) > 0
        parts = entry.forward_ms.max + entry.engine_ms.max + entry.runner_ms.max
        assert parts >= entry.step_ms.max - 0.01
        assert 0 < entry.python < 1


@pytest.mark.model
def test_growth_is_measured_for_one_and_two_fronts_and_one_and_two_replicas(default_model_source, monkeypatch):
    """Two real servers, one with two fronts and one with two replicas. The others are not started."""
    load = growth.StreamLoad(num_streams=8, num_tokens=20, rounds=3)
    real = {}
    for fronts, replicas in ((2, 1), (1, 2)):
        with growth._server(fronts, replicas, growth.FRONT_STEP_MS) as server:
            real[replicas] = growth._measured(server, fronts, replicas, 4, load)
    for entry in real.values():
        assert entry.tokens_per_s > 0
        assert entry.us_a_token >= entry.busiest_us > 0

    def measured(_, fronts, replicas, interval, load):
        return msgspec.structs.replace(real[replicas], fronts=fronts, replicas=replicas, tokens_an_event=interval)

    monkeypatch.setattr(growth, "_server", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(growth, "_measured", measured)
    figures = growth.run_growth(load)
    assert [(entry.fronts, entry.replicas, entry.tokens_an_event) for entry in figures] == [
        (1, 1, 1),
        (1, 1, 4),
        (2, 1, 1),
        (2, 1, 4),
        (1, 1, 1),
        (1, 2, 1),
    ]
    assert len(growth.table(figures).splitlines()) == len(figures) + 2
