"""Figures against numpy and against arithmetic done by hand."""

import msgspec
import numpy as np
import pytest

from tureen.bench.drive import FinishedRequest
from tureen.bench.report import Goals, keeps, percentile, ratios, spread, summarise, table


def _answer(start, times, end, *, prompt=10, output=None, cached=0, refused=False):
    return FinishedRequest(
        started_s=start,
        token_times_s=times,
        ended_s=end,
        prompt_tokens=0 if refused else prompt,
        output_tokens=len(times) if output is None else output,
        cached_tokens=cached,
        refused=refused,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentiles_equal_numpys(count, percent):
    values = np.random.default_rng(count).exponential(size=count).tolist()
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_a_spread_is_median_p99_and_maximum_in_milliseconds():
    values = np.random.default_rng(0).exponential(size=500)
    found = spread(values.tolist())
    assert found.p50 == pytest.approx(1000 * np.median(values), abs=1e-3)
    assert found.p99 == pytest.approx(1000 * np.percentile(values, 99), abs=1e-3)
    assert found.max == pytest.approx(1000 * values.max(), abs=1e-3)


def test_rates_of_requests_that_overlap_are_of_the_whole_pass():
    answers = [_answer(0.0, [1.0, 2.0], 2.0), _answer(0.5, [1.5, 2.5, 4.0], 4.0, cached=6)]
    result = summarise(answers, workload="w", target="t", concurrency=2)
    assert result.seconds == 4.0
    assert (result.output_tokens, result.prompt_tokens, result.cached_tokens) == (5, 20, 6)
    assert (result.output_tok_s, result.prompt_tok_s, result.total_tok_s) == (1.25, 5.0, 6.25)
    assert result.request_s == 0.5
    assert result.ttft_ms.p50 == 1000.0
    assert (result.itl_ms.p50, result.itl_ms.max) == (1000.0, 1500.0)
    assert result.e2e_ms.max == 3500.0


def test_rates_of_one_request_after_another_are_of_the_median_request():
    answers = [_answer(10.0 * i, [10.0 * i + 1], 10.0 * i + length, output=8) for i, length in enumerate((2, 2, 9))]
    result = summarise(answers, workload="w", target="t", concurrency=1)
    assert result.output_tok_s == 4.0
    assert result.seconds == 29.0


def test_goodput_counts_requests_that_keep_both_goals():
    goals = Goals(ttft_ms=500.0, itl_ms=100.0)
    good = _answer(0.0, [0.4, 0.5], 0.5)
    late = _answer(0.0, [0.6, 0.65], 0.7)
    slow = _answer(0.0, [0.4, 0.8], 2.0)
    refused = _answer(0.0, [], 0.01, refused=True)
    assert [keeps(a, goals) for a in (good, late, slow, refused)] == [True, False, False, False]
    result = summarise([good, late, slow, refused], workload="w", target="t", concurrency=None, goals=goals)
    assert result.goodput_request_s == 0.5
    assert (result.requests, result.refused) == (4, 1)


def test_an_answer_of_one_token_has_no_gap_between_tokens():
    result = summarise([_answer(0.0, [0.2], 0.3)], workload="w", target="t", concurrency=1)
    assert result.itl_ms is None
    assert keeps(_answer(0.0, [0.2], 0.3), Goals(300.0, 0.001))


def test_a_pass_in_which_everything_was_refused_has_no_latencies():
    result = summarise([_answer(0.0, [], 0.1, refused=True)], workload="w", target="t", concurrency=None)
    assert (result.refused, result.ttft_ms, result.itl_ms, result.e2e_ms) == (1, None, None, None)
    assert result.output_tok_s == 0.0


def test_ratios_compare_within_a_round_and_take_the_median():
    def result(target, number, rate):
        found = summarise([_answer(0.0, [1.0], 1.0)], workload="w", target=target, concurrency=1, round_number=number)
        found.total_tok_s = rate
        return found

    rounds = [(100, 50), (30, 10), (80, 40)]
    results = [r for i, (a, b) in enumerate(rounds) for r in (result("ours", i, a), result("theirs", i, b))]
    assert "2.00x" in ratios(results, ["ours", "theirs"])


def test_the_table_has_a_line_a_result_and_a_dash_for_what_is_unknown():
    result = summarise([_answer(0.0, [0.2], 0.3, cached=None)], workload="w", target="t", concurrency=1)
    for is_wide in (False, True):
        lines, _, legend = table([result, result], is_wide=is_wide).partition("\n\n")
        assert len(lines.splitlines()) == 3
        assert legend
    assert "–" in lines.splitlines()[1]


def test_the_usual_table_fits_a_terminal_of_eighty_columns_and_its_headings_have_units():
    numbers = {"output_tok_s": 12345.6, "total_tok_s": 12345.6}
    result = summarise([_answer(0.0, [20.0, 90.0], 99.0)], workload="throughput", target="tureen", concurrency=1)
    shown = table([msgspec.structs.replace(result, **numbers)], is_wide=False)
    heading, line = shown.splitlines()[:2]
    assert len(line) <= len(heading) + 2 <= 80
    units = heading.replace("workload", "").replace("target", "").replace("requests", "").split("  ")
    assert {unit.split()[-1] for unit in units if unit.strip()} == {"tok/s", "ms"}


def test_a_result_can_be_written_as_json():
    result = summarise([_answer(0.0, [0.2], 0.3)], workload="w", target="t", concurrency=1)
    assert msgspec.json.decode(msgspec.json.encode(result))["ttft_ms"]["p50"] == 200.0
