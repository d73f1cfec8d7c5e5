"""One model whose layers are shared out among stages: the bits of one process, and the model that transformers has."""

import json

import pytest
import torch
from rank_threads import CPU, DEVICE, ranks_in_threads
from runner_driver import PROMPT, SPEC, Running, computed, distance, folder_source, hidden_states
from samples import some
from tiny_adapters import write_adapter
from tiny_models import greedy, logprobs, write

from tureen.config import Config
from tureen.contract.runner import Batch, Row
from tureen.contract.types import NO_TOKEN
from tureen.devices.groups import RankGroup
from tureen.errors import StartupError
from tureen.models.stages import layers_of, why_not
from tureen.runner import loading
from tureen.runner.load import load_runner
from tureen.runner.stage_forward import StageFactory

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="threads of one GPU meet by gloo, which sends tensors of a CPU"),
]

CLOSE = 1e-4
MODELS = {
    "llama": {"num_hidden_layers": 5},
    "smollm3": {},
    "gemma3": {},
    "qwen2-moe": {},
    "deepseek-v3": {},
}
"""With more keys of their config: untied and tied heads, layers of several kinds, with experts and without."""


def alone(folder, **settings):
    """The model in one process, by torch."""
    config = Config(device="cpu", kernels="torch", num_threads=1, max_total_tokens=1024, **settings)
    return load_runner(folder_source(folder), config)


def everything(runner):
    first = computed(runner)
    states = hidden_states(runner)
    return first, (first.output, first.output_logprobs, first.prompt_logprobs, states)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", MODELS)
def test_logits_and_states_are_those_of_one_process_to_the_last_bit_and_close_to_transformers(tmp_path, variant):
    oracle = write(tmp_path, variant, **MODELS[variant])
    first, expected = everything(alone(tmp_path, dtype="float32"))
    for num_stages in some((3, 2), 1):
        with ranks_in_threads(tmp_path, num_stages, dtype="float32", pipeline_parallel_size=num_stages) as runner:
            assert everything(runner)[1] == expected
    assert first.output == greedy(oracle, PROMPT, 6, draft=first.output)
    reports = first.prompt_logprobs + first.output_logprobs
    rows = logprobs(oracle, first.token_ids[:-1])
    assert max(distance(report, row) for report, row in zip(reports, rows, strict=True)) < CLOSE


def test_bits_are_those_of_one_process_in_sixteen_bits_too(tmp_path):
    write(tmp_path, "qwen3")
    expected = everything(alone(tmp_path, dtype="bfloat16"))[1]
    with ranks_in_threads(tmp_path, 2, dtype="bfloat16", pipeline_parallel_size=2) as runner:
        assert everything(runner)[1] == expected


def test_adapters_give_what_they_give_in_one_process(tmp_path):
    base = write(tmp_path / "model", "llama", num_hidden_layers=3)
    folders = tuple(tmp_path / str(seed) for seed in (1, 2))
    for seed, folder in enumerate(folders, 1):
        write_adapter(base, folder, seed=seed, r=4 + seed, target_modules=["q_proj", "o_proj", "down_proj"])

    def drawn(runner):
        states = [Running(slot, PROMPT, range(6 * slot, 6 * slot + 6), logprobs=SPEC) for slot in range(3)]
        rows = [Row(slot, tuple(PROMPT), 0, states[slot].pages, True, adapter=slot) for slot in range(3)]
        outputs = runner.run(Batch(tuple(rows), tuple(sequence.state for sequence in states))).rows
        return [output.logprobs for output in outputs]

    one = alone(tmp_path / "model", dtype="float32")
    for number, folder in enumerate(folders, 1):
        one.call("load_adapter", number=number, path=str(folder))
    expected = drawn(one)
    assert len({report.top for (report,) in expected}) == 3
    with ranks_in_threads(tmp_path / "model", 3, folders, dtype="float32", pipeline_parallel_size=3) as runner:
        assert drawn(runner) == expected


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("vocab_size", [256, 1024, 8192])
def test_each_layer_is_in_one_stage_and_no_stage_is_empty(tmp_path, num_layers, vocab_size):
    config = shape_of(tmp_path, num_hidden_layers=num_layers, vocab_size=vocab_size)
    for num_stages in range(1, num_layers + 1):
        stages = [layers_of(config, stage, num_stages) for stage in range(num_stages)]
        assert all(stages)
        assert [layer for layers in stages for layer in layers] == list(range(num_layers))


def shape_of(folder, **changes):
    write(folder, "llama", **changes)
    return loading.describe(json.loads((folder / "config.json").read_text()))


def test_a_rank_has_the_weights_and_the_pages_of_its_layers_alone(tmp_path):
    config = shape_of(tmp_path, num_hidden_layers=8)
    groups = [RankGroup(rank, 3) for rank in range(3)]
    whole = 4 * sum(torch.Size(shape).numel() for shape in config.weights().values())
    own = [StageFactory.weight_bytes(config, torch.float32, CPU, group) for group in groups]
    assert sum(own) == whole
    assert max(own) < 0.4 * whole
    token_bytes = [StageFactory.token_bytes(config, torch.float32, group) for group in groups]
    assert sum(token_bytes) == 2 * 8 * 2 * 16 * 4  # keys and values, layers, heads, numbers of a head, bytes
    assert max(token_bytes) < sum(token_bytes) / 2


def test_more_stages_than_layers_are_refused_with_what_can_be(tmp_path):
    assert "the model has 2 layers" in why_not(shape_of(tmp_path), 3)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kernels": "native"}, "kernels"),
        ({"kernels": "tree"}, "kernels"),
        ({"attention_backend": "native"}, "attention_backend"),
        ({"model_impl": "transformers"}, "model_impl"),
        ({"kv_disk": "pages"}, "kv_disk"),
        ({"engine": "thread"}, "engine"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"quantization": "int8"}, "quantization"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size"),
    ],
)
def test_settings_that_do_not_go_with_stages_are_refused_by_name(tmp_path, settings, field):
    write(tmp_path, "llama")
    with pytest.raises(StartupError) as caught:
        load_runner(folder_source(tmp_path), Config(**{"device": "cpu", "pipeline_parallel_size": 2} | settings))
    assert caught.value.field == field
    assert f"--{field.replace('_', '-')}" in caught.value.message


def test_embeddings_of_a_picture_go_through_the_stages_as_through_one_process(tmp_path):
    model = write(tmp_path, "llama", **MODELS["llama"])
    given = model.get_input_embeddings().weight[PROMPT].detach().to(torch.float32).numpy().tobytes()
    sequence = Running(0, PROMPT, range(64), logprobs=SPEC)
    row = Row(0, (NO_TOKEN,) * len(PROMPT), 0, sequence.pages, True, embeds=given)

    def drawn(runner):
        [output] = runner.run(Batch((row,), (sequence.state,))).rows
        return output.token_ids, output.logprobs

    expected = drawn(alone(tmp_path, dtype="float32"))
    with ranks_in_threads(tmp_path, 2, dtype="float32", pipeline_parallel_size=2) as runner:
        assert drawn(runner) == expected
