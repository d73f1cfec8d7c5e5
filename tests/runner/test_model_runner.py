import os
import random

import pytest
import torch
from runner_driver import GREEDY, Running, folder_source, generate, random_tokens, step
from tiny_models import greedy, write

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.runner import NAN_LOGITS, Batch
from tureen.contract.types import LogprobSpec
from tureen.errors import NotFound, StartupError
from tureen.kernels.cpu import native
from tureen.runner.load import load_runner

DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
EVERYTHING = LogprobSpec(prompt_start=0, top=256)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95)
PROMPT = random_tokens(45, 5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, write(folder, "llama")


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "native" and (DEVICE != "cpu" or native.load() is None):
        pytest.skip("no native kernels")
    monkeypatch.setitem(DEFAULTS, "kernels", request.param)
    return request.param


DEFAULTS = {"device": DEVICE, "dtype": "float32", "max_total_tokens": 4096, "num_threads": 1}
only_torch = pytest.mark.parametrize("kernels", ["torch"], indirect=True)


def make_runner(folder, **settings):
    return load_runner(folder_source(folder), Config(**(DEFAULTS | settings)))


def caches(runner):
    """Tensors that hold keys and values, of torch's kernels."""
    attention = runner._forward._attention
    return [*attention._keys, *attention._values]


def crowd(count, first_slot=1, first_page=20):
    """Sequences of many lengths, greedy and seeded."""
    rng = random.Random(1)
    for index in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 63)))]
        pages = range(first_page + 6 * index, first_page + 6 * index + 6)
        yield Running(first_slot + index, prompt, pages, params=(GREEDY, SEEDED)[index % 2], seed=index)


@pytest.mark.skipif(DEVICE != "cpu", reason="bit for bit on CPU only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_and_logprobs_do_not_depend_on_batch_mates_chunks_or_pages(llama, params, dtype):
    runner = make_runner(llama[0], dtype=dtype)

    def run(pages, chunk, others):
        sequence = Running(0, PROMPT, pages, params=params, logprobs=EVERYTHING, seed=99)
        mates = list(crowd(others))
        while len(sequence.output) < 8:
            step(runner, [*mates[:7], sequence, *mates[7:]], [3] * len(mates[:7]) + [chunk] + [50] * len(mates[7:]))
        return sequence.output, sequence.output_logprobs

    alone = run(range(10), 1000, 0)
    assert run(range(10, 20), 1, 0) == alone
    assert run(range(9, -1, -1), 7, 5) == alone
    assert run(range(10), 1000, 30) == alone


@only_torch
def test_whatever_unused_pages_hold_never_surfaces(llama):
    runner = make_runner(llama[0])
    for cache in caches(runner):
        cache.fill_(float("nan"))
    assert generate(runner, Running(0, PROMPT, [7, 3, 9, 1]), 10, chunk=9) == greedy(llama[1], PROMPT, 10)


@only_torch
def test_a_row_with_nan_fails_alone(llama):
    runner = make_runner(llama[0])
    sick, well = Running(0, PROMPT, range(8)), Running(1, PROMPT, range(8, 16))
    step(runner, [sick, well], [1000, 1000])
    for cache in caches(runner):
        cache[5] = float("nan")  # position 5 of the first
    while len(well.output) < 6:
        step(runner, [sick, well] if not sick.errors else [well], [1, 1] if not sick.errors else [1])
    assert sick.errors == [NAN_LOGITS]
    assert well.output == greedy(llama[1], PROMPT, 6)


@only_torch
def test_a_row_whose_prompt_logprobs_are_nan_fails_alone(llama):
    runner = make_runner(llama[0])
    sick = Running(0, PROMPT, range(8), logprobs=EVERYTHING)
    well = Running(1, PROMPT, range(8, 16), logprobs=EVERYTHING)
    step(runner, [sick, well], [20, 20], score=True)
    for cache in caches(runner):
        cache[5] = float("nan")
    step(runner, [sick, well], [20, 20], score=True)
    assert sick.errors == [NAN_LOGITS]
    assert not well.errors
    assert len(well.prompt_logprobs) == 40


@only_torch
def test_only_positions_that_are_asked_for_reach_the_head(llama, monkeypatch):
    runner = make_runner(llama[0])
    rows_seen = []
    model = runner._forward._model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: rows_seen.append(len(hidden)) or logits(hidden))
    sequence = Running(0, PROMPT, range(8))
    step(runner, [sequence], [20])
    assert rows_seen == []
    step(runner, [sequence], [1000])
    assert rows_seen == [1]


def test_prompt_logprobs_in_pieces_equal_those_in_one(llama, monkeypatch):
    def scores():
        sequence = Running(0, PROMPT, range(8), logprobs=EVERYTHING)
        step(make_runner(llama[0]), [sequence], [44], score=True)
        return sequence.prompt_logprobs

    whole = scores()
    assert len(whole) == 44
    monkeypatch.setattr("tureen.runner.forward.SCORE_LOGITS", 256 * 5)
    for piece, one in zip(scores(), whole, strict=True):
        assert [token for _, token in piece.top[:5]] == [token for _, token in one.top[:5]]
        assert piece.token[0] == pytest.approx(one.token[0], abs=1e-5)


def test_a_step_that_raises_leaves_the_sampler_as_it_was(llama, monkeypatch):
    penalised = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    undisturbed = Running(0, PROMPT, range(8), params=penalised)
    generate(make_runner(llama[0]), undisturbed, 6)
    runner = make_runner(llama[0])
    sequence = Running(0, PROMPT, range(8), params=penalised)
    generate(runner, sequence, 3)
    with monkeypatch.context() as patch:
        patch.setattr(runner._forward, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError):
            step(runner, [sequence], [1])
    assert generate(runner, sequence, 6) == undisturbed.output


def test_new_slots_without_rows_and_empty_batches_are_fine(llama):
    runner = make_runner(llama[0])
    assert runner.run(Batch(())).rows == ()
    sequence = Running(0, PROMPT, range(8))
    assert runner.run(Batch((), (sequence.state,))).rows == ()
    sequence.is_new = False
    assert generate(runner, sequence, 3) == greedy(llama[1], PROMPT, 3)


def test_a_prefix_computed_by_another_sequence_is_used(llama):
    runner = make_runner(llama[0])
    first = Running(0, PROMPT, range(8))
    generate(runner, first, 1)
    second = Running(1, PROMPT, [0, 1, 20, 21, 22])
    second.num_computed = 32
    assert generate(runner, second, 5) == greedy(llama[1], PROMPT, 5)


def test_capacity_tells_what_was_asked_for(llama):
    capacity = make_runner(llama[0], max_total_tokens=1000, page_size=16, max_running_requests=5).capacity()
    assert (capacity.num_pages, capacity.page_size, capacity.max_rows) == (62, 16, 5)
    assert (capacity.vocab_size, capacity.context_len) == (256, 512)
    assert capacity.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_the_context_is_no_longer_than_the_pool(llama):
    assert make_runner(llama[0], max_total_tokens=100).capacity().context_len == 96
    assert make_runner(llama[0], context_length=300).capacity().context_len == 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 513}, r"--context-length 513 .* 512"),
        ({"max_total_tokens": 7}, r"--max-total-tokens 7 .* one page of 16"),
        (
            {"max_total_tokens": 10**13},
            r"--max-total-tokens 10000000000000 needs [\d.]+ GiB, but .* lower it to at most \d+",
        ),
    ],
)
def test_settings_that_cannot_be_met_end_the_start_with_numbers(llama, settings, message):
    with pytest.raises(StartupError, match=message):
        make_runner(llama[0], **settings)


@only_torch
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8"}, r"--quantization int8: .* --kernels native"),
        ({"activations": "int16"}, r"--activations int16: .* --kernels native"),
        ({"kv_cache_dtype": "int8"}, r"--kv-cache-dtype int8: .* here float32; .* --kernels native"),
        ({"kv_cache_dtype": "int4"}, r"--kv-cache-dtype int4: .* here float32; .* --kernels native"),
        ({"kv_cache_dtype": "bfloat16"}, r"--kv-cache-dtype bfloat16: .* here float32; leave it out"),
    ],
)
def test_settings_that_torch_cannot_honour_end_the_start_with_the_fix(llama, settings, message):
    with pytest.raises(StartupError, match=message):
        make_runner(llama[0], **settings)


def test_a_kv_cache_of_the_type_of_the_weights_may_be_asked_for(llama):
    assert make_runner(llama[0], kv_cache_dtype="float32").capacity().kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (1000, r"the weights need .* GiB in float32, but cpu has .* --dtype"),
        (450_000, r"one page .* --mem-fraction-static"),
    ],
)
def test_too_little_memory_is_noticed_before_any_is_taken(llama, monkeypatch, kernels, free, message):
    monkeypatch.setattr("tureen.devices.cpu.free_bytes", lambda: free)
    taking = {"native": "tureen.runner.native._packed", "torch": "tureen.models.torch_decoder.as_tensor"}[kernels]
    monkeypatch.setattr(taking, lambda *_: pytest.fail("weights were read"))
    with pytest.raises(StartupError, match=message):
        make_runner(llama[0], device="cpu", max_total_tokens=None, page_size=1024)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_but_absent_names_the_fix(llama):
    with pytest.raises(StartupError, match=r"--device cuda: torch .* use --device cpu"):
        make_runner(llama[0], device="cuda")


def test_dummy_weights_need_no_weights_file(llama, tmp_path):
    (tmp_path / "config.json").write_text((llama[0] / "config.json").read_text())
    outputs = [generate(make_runner(tmp_path, load_format="dummy"), Running(0, PROMPT, range(8)), 5) for _ in range(2)]
    assert outputs[0] == outputs[1]


def test_operations_are_found_by_name(llama, kernels):
    runner = make_runner(llama[0])
    assert runner.call("device")["dtype"] == {"native": "f32", "torch": "float32"}[kernels]
    with pytest.raises(NotFound):
        runner.call("fly")


def test_a_row_may_end_exactly_at_a_page_and_at_the_context(llama):
    runner = make_runner(llama[0])
    prompt = (PROMPT * 12)[:510]
    sequence = Running(0, prompt, range(32))
    assert generate(runner, sequence, 3, chunk=64) == greedy(llama[1], prompt, 3)
