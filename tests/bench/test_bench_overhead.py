"""tureen's own share can be measured without a model. How large it is, is for the benchmark to say, not for a test."""

from byte_tokenizer import make_byte_tokenizer

from tureen.bench import overhead


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
