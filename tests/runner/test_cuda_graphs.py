"""Gate (c): captured decode steps, on a stand-in that refuses what CUDA graphs refuse, compute what plain steps do."""

from types import SimpleNamespace

import pytest
import torch
from captured_tape import Refused, Tape, watched
from launches import operations
from runner_driver import Running, folder_source, random_tokens, step
from tiny_models import write

from tureen.attention.reference import make_backend
from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import LogprobSpec
from tureen.runner import cuda_graphs
from tureen.runner.load import load_runner

MODELS = ("llama", "gemma2-softcaps", "mistral-sliding", "qwen3")
SETTINGS = {"device": "cpu", "kernels": "torch", "dtype": "float32", "max_total_tokens": 2048, "num_threads": 1}


def load(folder, tape=None):
    runner = load_runner(folder_source(folder), Config(**SETTINGS))
    if tape is not None:
        capacity = runner.capacity()
        runner.forward.capture(tape, capacity, capacity.num_pages - 1)
        assert runner.forward._steps is not None
    return runner


def sequences(slots=(0, 1, 2), first_page=0):
    """Sequences of different lengths, greedy and not, one of which reports log-probabilities."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=1),
    ]
    return [
        Running(
            slot,
            random_tokens(3 + 13 * index, 40 + index),
            range(first_page + 8 * index, first_page + 8 * index + 8),
            params=params[index],
            seed=index,
            logprobs=LogprobSpec(top=5) if index == 1 else None,
        )
        for index, slot in enumerate(slots)
    ]


def prefill(runner, running):
    step(runner, running, [1000] * len(running))


def decode(runner, running, count):
    for _ in range(count):
        step(runner, running, [1] * len(running))


def told(running):
    return [(each.output, each.output_logprobs) for each in running]


@pytest.mark.parametrize("model", MODELS)
def test_captured_steps_write_what_plain_steps_write(model, tmp_path):
    write(tmp_path, model)
    tape = Tape()
    results = []
    for runner in (load(tmp_path), load(tmp_path, tape)):
        running = sequences()
        prefill(runner, running)
        decode(runner, running, 20)  # over the ends of pages, and of a window
        decode(runner, running[:1], 5)  # fewer rows, all greedy
        decode(runner, running, 3)
        results.append(told(running))
    assert results[0] == results[1]
    assert tape.num_captures == 2  # of 4 rows, and of 1
    assert tape.num_replays == 19 + 4 + 3


def test_a_slot_of_another_sequence_and_a_sequence_in_other_pages(tmp_path):
    write(tmp_path, "llama")
    tape, results = Tape(), []
    for runner in (load(tmp_path), load(tmp_path, tape)):
        first, second = sequences(), sequences(slots=(2, 0, 1), first_page=40)
        for running in (first, second):
            prefill(runner, running)
            decode(runner, running, 6)
        moved = sequences(first_page=80)
        prefill(runner, moved)
        decode(runner, moved, 2)
        results.append([told(first), told(second), told(moved)])
    assert results[0] == results[1]
    assert tape.num_captures == 1


def test_more_keys_than_before_have_a_step_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "KEY_COUNTS", (64, 128, 256, 512))
    write(tmp_path, "llama")
    tape, results = Tape(), []
    for runner in (load(tmp_path), load(tmp_path, tape)):
        running = [Running(0, random_tokens(60, 7), range(8))]
        prefill(runner, running)
        decode(runner, running, 12)
        results.append(told(running))
    assert results[0] == results[1]
    assert tape.num_captures == 2


def test_steps_whose_keys_would_take_much_memory_are_not_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST_GATHERED", 2 * 512)
    write(tmp_path, "llama")
    tape, results = Tape(), []
    for runner in (load(tmp_path), load(tmp_path, tape)):
        running = sequences()
        prefill(runner, running)
        decode(runner, running, 3)
        decode(runner, running[:2], 3)
        decode(runner, running, 2)
        results.append(told(running))
    assert results[0] == results[1]
    assert tape.num_replays == 2  # of two rows


def test_steps_around_replays_take_no_memory(tmp_path):
    write(tmp_path, "llama")
    tape = Tape()
    runner, running = load(tmp_path, tape), sequences()[:1]
    prefill(runner, running)
    decode(runner, running, 3)
    with watched():
        decode(runner, running, 3)
    assert tape.num_replays == 5


def test_a_step_that_reads_a_tensor_is_refused_and_steps_go_on_without_graphs(tmp_path, monkeypatch, caplog):
    write(tmp_path, "llama")
    tape, results = Tape(), []
    note = cuda_graphs._note_best
    monkeypatch.setattr(cuda_graphs, "_note_best", lambda logits, results: (logits.max().item(), note(logits, results)))
    for runner in (load(tmp_path), load(tmp_path, tape)):
        running = sequences()
        prefill(runner, running)
        decode(runner, running, 4)
        results.append(told(running))
    assert results[0] == results[1]
    assert tape.num_captures == 1
    assert tape.num_replays == 0
    assert [record.message for record in caplog.records if "CUDA graphs cannot be captured" in record.message]


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: torch.tensor([1.0]),
        lambda x: x[x > 0],
    ],
)
def test_the_stand_in_refuses_what_a_capture_refuses(fault):
    with pytest.raises(Refused):
        Tape().capture(lambda: fault(torch.ones(3)))


def test_the_stand_in_repeats_numbers_of_the_host_as_they_were(tmp_path):
    x, numbers = torch.zeros(2), [1.0]
    replay = Tape().capture(lambda: x.add_(numbers[0]))
    numbers[0] = 5.0
    replay()
    assert x.tolist() == [2.0, 2.0]  # as many as the capture computed, and one more


def test_a_captured_step_of_torch_operations_launches_as_many_as_the_page_says():
    one, two = (operations(layers, make_backend) for layers in (1, 2))
    assert two - one == 42
    assert one + 31 * (two - one) <= 1397  # docs/gpu.md, tools/gpu_predictions.py


def test_a_backend_that_does_not_plan_on_the_device_is_not_captured(tmp_path):
    write(tmp_path, "llama")
    runner = load_runner(folder_source(tmp_path), Config(**SETTINGS))
    runner.forward._attention = SimpleNamespace(plan=runner.forward._attention.plan, forward=None)
    runner.forward.capture(Tape(), runner.capacity(), 0)
    assert runner.forward._steps is None


def test_models_whose_steps_the_host_must_see_are_not_captured(tmp_path):
    write(tmp_path, "qwen2-moe")
    runner = load_runner(folder_source(tmp_path), Config(**SETTINGS))
    runner.forward.capture(Tape(), runner.capacity(), 0)
    assert runner.forward._steps is None
