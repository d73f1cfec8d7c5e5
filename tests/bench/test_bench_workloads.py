"""Prompts have exact lengths and are new to every server; arrivals are a Poisson process."""

import itertools
import statistics

import pytest

from tureen.bench.workloads import SHAPES, Dice, make_load, mixed_jobs, shapes

VOCAB = 49152


@pytest.mark.parametrize("workload", SHAPES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_job_has_exactly_the_lengths_of_its_shape(workload, quick):
    for shape in shapes(workload, quick=quick):
        load = make_load(shape, Dice(VOCAB, 1, shape.name))
        assert {len(job.prompt) for job in load.jobs} == {shape.common_len + shape.prompt_len}
        assert {job.output_len for job in load.jobs} == {shape.output_len}
        assert len(load.jobs) == shape.requests >= shape.concurrency


def test_the_workloads_are_those_that_results_are_compared_by():
    sizes = {
        shape.name: (shape.common_len, shape.prompt_len, shape.output_len, shape.concurrency)
        for workload in SHAPES
        for shape in shapes(workload, quick=False)
    }
    assert sizes == {
        "single": (0, 32, 128, 1),
        "prefill-512": (0, 512, 1, 1),
        "prefill-2048": (0, 2048, 1, 1),
        "throughput-16": (0, 128, 128, 16),
        "throughput-64": (0, 128, 128, 64),
        "shared-prefix": (1024, 32, 32, 8),
        "long": (0, 7936, 128, 1),
    }
    assert [shape.requests for shape in shapes("single", quick=False)] == [7]
    assert [shape.requests for shape in shapes("shared-prefix", quick=False)] == [32]


def test_requests_share_the_common_prefix_and_nothing_more():
    (shape,) = shapes("shared-prefix", quick=False)
    prompts = [job.prompt for job in make_load(shape, Dice(VOCAB, 1)).jobs]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({prompt[1024] for prompt in prompts}) > 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 32


@pytest.mark.parametrize("vocab", [49152, 128256, 151936, 262144])
def test_special_tokens_at_the_ends_of_the_vocabulary_are_never_drawn(vocab):
    drawn = Dice(vocab, 1).token_ids(20000)
    assert min(drawn) >= vocab // 16
    assert max(drawn) < vocab - vocab // 16


def test_the_same_seed_gives_the_same_prompts_and_another_round_others():
    assert Dice(VOCAB, 5, "a", 0).token_ids(32) == Dice(VOCAB, 5, "a", 0).token_ids(32)
    assert Dice(VOCAB, 5, "a", 0).token_ids(32) != Dice(VOCAB, 5, "a", 1).token_ids(32)
    assert Dice(VOCAB, 5, "a", 0).token_ids(32) != Dice(VOCAB, 5, "b", 0).token_ids(32)
    assert Dice(VOCAB, 5, "a", 0).token_ids(32) != Dice(VOCAB, 6, "a", 0).token_ids(32)


def test_arrivals_come_at_the_rate_asked_for_with_exponential_gaps():
    arrivals = Dice(VOCAB, 3).arrivals(20001, 50.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # of an exponential: its mean


def test_mixed_lengths_are_lognormal_around_their_medians():
    jobs = mixed_jobs(Dice(VOCAB, 3), 4000)
    prompts, outputs = [len(job.prompt) for job in jobs], [job.output_len for job in jobs]
    assert statistics.median(prompts) == pytest.approx(128, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(64, rel=0.1)
    assert min(prompts) >= 8
    assert max(prompts) == 1024
    assert min(outputs) >= 4
    assert max(outputs) == 256


def test_concurrency_and_requests_can_be_given():
    (shape,) = shapes("throughput", quick=False, concurrency=4)
    assert (shape.name, shape.concurrency, shape.requests) == ("throughput-4", 4, 8)
    (shape,) = shapes("single", quick=True, requests=2)
    assert shape.requests == 2
