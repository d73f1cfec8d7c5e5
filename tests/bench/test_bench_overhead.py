"""tureen's own share can be measured without a model. How large it is, is for the benchmark to say, not for a test."""

from byte_tokenizer import make_byte_tokenizer

from tureen.bench import overhead, processors


def test_the_engines_share_is_measured_at_every_number_of_sequences(monkeypatch):
    monkeypatch.setattr(overhead, "STEPS", 5)
    found = overhead.engine_overhead(make_byte_tokenizer())
    assert [entry.running for entry in found] == [1, 16, 64]
    assert all(0 < entry.step_ms.p50 <= entry.step_ms.max for entry in found)


def test_the_share_of_http_is_measured_against_the_same_request_without_it(monkeypatch):
    monkeypatch.setattr(overhead, "REQUESTS", 5)
    monkeypatch.setattr(overhead, "WARM_UP", 1)
    found = overhead.http_overhead(make_byte_tokenizer())
    assert found.http_ms.p50 > found.direct_ms.p50 > 0


def test_the_share_of_a_jailed_processor_is_measured_against_the_same_step_without_it(monkeypatch):
    monkeypatch.setattr(processors, "STEPS", 5)
    found = processors.processor_overhead()
    assert [entry.processor for entry in found] == list(processors.CLASSES)
    assert all(entry.with_ms.p50 > 0 < entry.without_ms.p50 for entry in found)
