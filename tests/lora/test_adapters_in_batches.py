"""Rows of one batch with different adapters, and without, compute what peft computes for each of them."""

from __future__ import annotations

import random

import msgspec
import pytest
import tiny_gguf
import torch
from runner_driver import Running, folder_source, step
from samples import either, some
from tiny_adapters import write_adapter
from tiny_models import VARIANTS, logprobs, write

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.errors import InvalidRequest
from tureen.kernels.cpu import native
from tureen.layers.mixers import Mamba2
from tureen.runner.load import load_runner
from tureen.weights.source import open_model

pytestmark = pytest.mark.sampled

KERNELS = ("torch", "native")
LENGTH = either(41, 29)  # tokens of a prompt
CLOSE = 1e-4
SPEC = LogprobSpec(prompt_start=0, top=256)
BEST = LogprobSpec(prompt_start=0, top=4)
PAGES_EACH = 12
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
SETTINGS = (
    {"r": 4, "lora_alpha": 8, "dtype": torch.bfloat16},
    {"r": 13, "target_modules": ["q_proj", "v_proj", "qkv_proj", "down_proj"], "use_rslora": True},
    {"r": 1, "lora_alpha": 3, "rank_pattern": {"o_proj": 33}},
)
"""Of the adapters 1, 2 and 3. The first has numbers that bfloat16 holds, scaled too; the others have not."""


class Adapted(Running):
    """A sequence whose tokens use an adapter."""

    adapter = 0

    def next_row(self, chunk, *, score=False):
        return msgspec.structs.replace(super().next_row(chunk, score=score), adapter=self.adapter)


def make_runner(folder, kernels, dtype="float32"):
    if kernels == "native" and native.load() is None:
        pytest.skip(native.MISSING)
    config = Config(device="cpu", dtype=dtype, kernels=kernels, page_size=8, max_total_tokens=2048, num_threads=1)
    return load_runner(folder_source(folder), config)


def load_adapter(runner, number, folder):
    runner.call("load_adapter", number=number, path=str(folder))


def make_sequence(slot, adapter, *, length=None, pages_at=None, logprobs=SPEC):
    rng = random.Random(slot)
    prompt = [rng.randrange(256) for _ in range(length or 20 + either(7, 3) * slot)]
    first = PAGES_EACH * (slot if pages_at is None else pages_at)
    sequence = Adapted(slot, prompt, range(first, first + PAGES_EACH), logprobs=logprobs)
    sequence.adapter = adapter
    return sequence


def run(runner, sequences, count, chunks):
    """Until all have `count` output tokens; those that have do not run on."""
    while unfinished := [one for one in sequences if len(one.output) < count]:
        step(runner, unfinished, [chunks[one.state.slot % len(chunks)] for one in unfinished], score=True)
    return sequences


def reports(sequence):
    assert not sequence.errors
    return sequence.prompt_logprobs + sequence.output_logprobs


def distance(sequence, oracle):
    """Between all distributions that the sequence was told and the oracle's."""
    expected = logprobs(oracle, sequence.token_ids[:-1])
    return max(
        abs(value - row[token])
        for report, row in zip(reports(sequence), expected.tolist(), strict=True)
        for value, token in report.top
    )


@pytest.fixture(scope="module", params=(*either(("llama",), ()), "llama-biases", "phi3", "gemma3"))
def written(request, tmp_path_factory):
    """A model's folder, and the oracles by the number of their adapter."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write(folder, request.param)
    adapted = [write_adapter(model, folder / str(i), seed=i, **one) for i, one in enumerate(SETTINGS, start=1)]
    return folder, [model, *adapted]


@pytest.fixture(scope="module", params=KERNELS)
def runner(request, written):
    folder, _ = written
    found = make_runner(folder, request.param)
    for number in (1, 2, 3):
        load_adapter(found, number, folder / str(number))
    return found


@pytest.mark.parametrize("chunks", [(1000,), (1, 8, 5, 50, 3)])
def test_every_row_of_a_batch_has_the_distributions_of_its_own_adapter(written, runner, chunks):
    _, oracles = written
    sequences = [make_sequence(slot, adapter) for slot, adapter in enumerate((1, 0, 2, 3, 1, 0, 2))]
    for sequence in run(runner, sequences, 3, chunks):
        assert distance(sequence, oracles[sequence.adapter]) < CLOSE
        other = oracles[(sequence.adapter + 1) % 4]
        assert distance(sequence, other) > 100 * CLOSE


@pytest.mark.parametrize("adapter", some(range(4), 2))
def test_the_bits_do_not_depend_on_chunks_neighbours_or_pages(runner, adapter):
    alone = reports(*run(runner, [make_sequence(0, adapter, length=LENGTH, logprobs=BEST)], 4, (1000,)))
    for chunks, mates, at in (((3,), (), 0), ((7,), (1, 2, 3, 0), 9), ((1000, 3, 16), (3, 3, adapter), 11)):
        sequence = make_sequence(0, adapter, length=LENGTH, pages_at=at, logprobs=BEST)
        others = [make_sequence(slot, mate, logprobs=BEST) for slot, mate in enumerate(mates, start=1)]
        place = len(others) // 2
        run(runner, [*others[:place], sequence, *others[place:]], 4, chunks)
        assert reports(sequence) == alone


def test_a_sequence_that_was_preempted_goes_on_with_the_same_bits(runner):
    whole = run(runner, [make_sequence(0, 2)], 8, (1000,))[0]
    sequence = run(runner, [make_sequence(0, 2), make_sequence(1, 3)], 3, (1000,))[0]
    sequence.num_computed, sequence.is_new = 0, True
    sequence.pages = tuple(range(100, 100 + PAGES_EACH))
    sequence.state = msgspec.structs.replace(sequence.state, output_ids=tuple(sequence.output))
    while sequence.num_computed < len(sequence.token_ids) - 1:
        step(runner, [sequence], [9])
    run(runner, [sequence, make_sequence(2, 1)], 8, (1000,))
    assert (sequence.token_ids, reports(sequence)) == (whole.token_ids, reports(whole))


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_that_goes_leaves_the_others_as_they_are(written, kernels):
    folder, oracles = written
    runner = make_runner(folder, kernels)
    for number, which in ((1, 1), (2, 2)):
        load_adapter(runner, number, folder / str(which))
    running = [make_sequence(0, 0), make_sequence(1, 2)]
    run(runner, running, 3, (1000,))
    runner.call("unload_adapter", number=1)
    load_adapter(runner, 3, folder / "1")
    newcomer = make_sequence(2, 3)
    for sequence, oracle in zip(run(runner, [*running, newcomer], 8, (6,)), (0, 2, 1), strict=True):
        assert distance(sequence, oracles[oracle]) < CLOSE
    for number in (2, 3):
        runner.call("unload_adapter", number=number)
    assert distance(run(runner, [make_sequence(0, 0)], 2, (1000,))[0], oracles[0]) < CLOSE


@pytest.mark.parametrize(
    ("variant", "kernels"),
    [(variant, kernels) for place, variant in enumerate(VARIANTS) for kernels in some(KERNELS[:: (-1) ** place], 1)],
)
def test_every_architecture_takes_adapters_wherever_they_are_supported(variant, kernels, tmp_path):
    model = write(tmp_path, variant)
    runner = make_runner(tmp_path, kernels)
    targets = "all-linear"
    if any(isinstance(mixer, Mamba2) for mixer in runner._model.mixers):  # PEFT refuses its out_proj
        targets = [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"]
    if runner._model.experts:
        targets = ATTENTION + (SHARED if variant == "qwen2-moe" else [])
    elif runner._model.layer_inputs is not None:
        targets = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "per_layer_input_gate", "per_layer_projection"]
    if runner._model.has_gate:
        targets = [*ATTENTION, "in_proj_qkv", "out_proj"]  # q_proj has the gates, too
    if runner._model.latent is not None:
        targets = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    if variant == "kimi-linear":
        targets += ["k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
    oracle = write_adapter(model, tmp_path / "adapter", target_modules=targets)
    load_adapter(runner, 1, tmp_path / "adapter")
    for sequence in run(runner, [make_sequence(0, 1), make_sequence(1, 0)], 2, (1000,)):
        assert distance(sequence, oracle if sequence.adapter else model) < CLOSE


def test_an_adapter_of_the_matrix_that_each_head_has_a_part_of_is_refused(tmp_path):
    model = write(tmp_path, "minicpm3")
    write_adapter(model, tmp_path / "adapter", target_modules=["kv_b_proj"])
    with pytest.raises(InvalidRequest, match=r"layers\.0\.self_attn\.kv_b_proj"):
        load_adapter(make_runner(tmp_path, "native"), 1, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key_heads", "is_refused"), [(2, True), (4, False)])
def test_adapters_of_heads_that_a_gguf_file_has_in_another_order_are_refused(key_heads, is_refused, tmp_path):
    model = write(tmp_path, "qwen3-5", linear_num_key_heads=key_heads)
    path = tiny_gguf.write_from_transformers(tmp_path / "m.gguf", model)
    oracle = write_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "k_proj", "out_proj"])
    config = Config(device="cpu", dtype="float32", kernels="torch", page_size=8, max_total_tokens=2048, num_threads=1)
    runner = load_runner(open_model(path), config)
    if is_refused:
        with pytest.raises(
            InvalidRequest, match=r"linear_attn\.out_proj', whose heads a GGUF file stores in another order"
        ):
            load_adapter(runner, 1, tmp_path / "adapter")
        return
    load_adapter(runner, 1, tmp_path / "adapter")
    for sequence in run(runner, [make_sequence(0, 1)], 2, (1000,)):
        assert distance(sequence, oracle) < CLOSE


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_small_types_round_what_an_adapter_adds_and_nothing_more(written, kernels, dtype):
    folder, oracles = written
    runner = make_runner(folder, kernels, dtype)
    load_adapter(runner, 1, folder / "1")
    sequence = run(runner, [make_sequence(0, 1)], 1, (1000,))[0]
    expected = logprobs(oracles[1], sequence.token_ids[:-1]).exp()
    off = [
        sum(abs(row[token] - 2.718281828459045**value) for value, token in report.top) / 2
        for report, row in zip(reports(sequence), expected.tolist(), strict=True)
    ]
    assert sum(off) / len(off) < (0.1 if dtype == "bfloat16" else 1e-4)  # total variation
