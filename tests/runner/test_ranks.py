"""One model over several ranks: the same bits however many there are, and the model that transformers has."""

import json
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
from rank_threads import ranks_in_threads
from runner_driver import PROMPT, SPEC, Running, computed, distance, folder_source, hidden_states
from samples import some
from tiny_adapters import write_adapter
from tiny_models import greedy, logprobs, write

from tureen.config import Config
from tureen.contract.runner import Batch, Row
from tureen.devices.groups import RankGroup
from tureen.errors import StartupError
from tureen.models.segments import NUM_SEGMENTS, cut, segments_of, why_not
from tureen.runner import loading
from tureen.runner.load import load_runner
from tureen.runner.rank_forward import RankFactory
from tureen.runner.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-4
MODELS = {
    "llama": {},
    "llama-biases": {"vocab_size": 251},
    "llama-tied": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen3": {},
    "gemma2-softcaps": {},
    "mixtral": {},
    "qwen2-moe": {},
}
"""With more keys of their config: a vocabulary that no number of ranks divides, and SmolLM2's heads."""


RANKS = [("llama-biases", 4), ("llama-tied", 2), ("qwen2-moe", 4)]
OTHER_RANKS = sorted({*product(MODELS, (2, 4))} - {*RANKS})


@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "num_ranks"), [*RANKS, *some(OTHER_RANKS, 0)])
def test_logits_and_states_are_equal_to_the_last_bit_with_several_ranks(tmp_path, variant, num_ranks):
    oracle = write(tmp_path, variant, **MODELS[variant])
    results = []
    for count in (1, num_ranks):
        with ranks_in_threads(tmp_path, count, dtype="float32") as runner:
            first = computed(runner)
            results.append((first.output, first.output_logprobs, first.prompt_logprobs, hidden_states(runner)))
    assert all(result == results[0] for result in results)
    assert first.output == greedy(oracle, PROMPT, 6, draft=first.output)
    expected = logprobs(oracle, first.token_ids[:-1])
    reports = first.prompt_logprobs + first.output_logprobs
    assert len(reports) == len(expected)
    assert max(distance(report, row) for report, row in zip(reports, expected, strict=True)) < CLOSE


def test_bits_are_equal_in_sixteen_bits_too(tmp_path):
    write(tmp_path, "qwen3")
    outputs = []
    for num_ranks in (1, 4):
        with ranks_in_threads(tmp_path, num_ranks, dtype="bfloat16") as runner:
            outputs.append(computed(runner).output_logprobs)
    assert outputs[0] == outputs[1]


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_adapters_give_what_peft_gives_with_any_number_of_ranks(tmp_path, variant):
    base = write(tmp_path / "model", variant)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    modules = [*modules, "gate_proj", "up_proj", "down_proj"] if variant == "llama" else modules
    adapted = [
        write_adapter(base, tmp_path / str(seed), seed=seed, r=4 + seed, target_modules=modules) for seed in (1, 2)
    ]
    results = []
    for num_ranks in some((1, 2, 4), 2):
        folders = (tmp_path / "1", tmp_path / "2")
        with ranks_in_threads(tmp_path / "model", num_ranks, folders, dtype="float32") as runner:
            states = [Running(slot, PROMPT, range(6 * slot, 6 * slot + 6), logprobs=SPEC) for slot in range(3)]
            rows = [Row(slot, tuple(PROMPT), 0, states[slot].pages, True, adapter=slot) for slot in range(3)]
            outputs = runner.run(Batch(tuple(rows), tuple(sequence.state for sequence in states))).rows
        results.append([output.logprobs for output in outputs])
    assert all(result == results[0] for result in results)
    for oracle, (report,) in zip((base, *adapted), results[0], strict=True):
        assert distance(report, logprobs(oracle, PROMPT)[-1]) < CLOSE


def test_every_number_of_a_weight_has_its_place_in_the_segments(tmp_path):
    write(tmp_path, "qwen2-moe", num_attention_heads=10, num_key_value_heads=5, head_dim=16)
    config = loading.describe(json.loads((tmp_path / "config.json").read_text()))
    segments = segments_of(config, 0, 1)
    for name, shape in config.weights().items():
        if "k_proj" in name or "v_proj" in name or name.endswith("bias"):
            continue
        counts = torch.zeros(shape)
        for segment in segments:
            counts[cut(config, segment, name)] += 1
        assert counts.unique().tolist() in ([1.0], [NUM_SEGMENTS])
    for segment in segments:
        groups = {head // 2 for head in segment.heads}
        assert groups <= set(segment.kv_heads)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "why"),
    [
        ({}, 8, "4 attention heads are shared out among 1 or 2 or 4 ranks"),
        ({}, 3, "1 or 2 or 4 ranks"),
        ({"intermediate_size": 4}, 2, "intermediate_size 4 cannot be cut into 8 segments"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_what_can(tmp_path, changes, num_ranks, why):
    write(tmp_path, "llama", **changes)
    config = loading.describe(json.loads((tmp_path / "config.json").read_text()))
    assert why in why_not(config, num_ranks)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel_size": 2, "kernels": "native"}, "kernels"),
        ({"tensor_parallel_size": 2, "attention_backend": "native"}, "attention_backend"),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, "model_impl"),
        ({"kernels": "tree", "kv_disk": "pages"}, "kv_disk"),
        ({"tensor_parallel_size": 2, "engine": "thread"}, "engine"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size"),
    ],
)
def test_settings_that_do_not_go_with_ranks_are_refused_by_name(tmp_path, settings, field):
    write(tmp_path, "llama")
    with pytest.raises(StartupError) as caught:
        load_runner(folder_source(tmp_path), Config(device="cpu", **settings))
    assert caught.value.field == field
    assert f"--{field.replace('_', '-')}" in caught.value.message


def test_the_file_in_which_ranks_meet_is_there_until_they_end():
    # one that reads it after the others have met would wait for it until its time is over
    ranks = Ranks(RankGroup(0, 2), "tensor_parallel_size")
    torch.distributed.FileStore(ranks.store_path, 2).set("address", "here")
    assert torch.distributed.FileStore(ranks.store_path, 2).get("address") == b"here"
    ranks.close()
    assert not Path(ranks.store_path).parent.exists()


def test_ranks_that_cannot_be_built_leave_no_folder_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    write(tmp_path / "model", "llama")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(RankFactory, "__init__", fail)
    config = Config(device="cpu", tensor_parallel_size=2, dtype="float32", max_total_tokens=1024)
    with pytest.raises(MemoryError):
        load_runner(folder_source(tmp_path / "model"), config)
    assert not list((tmp_path / "temporary").iterdir())
