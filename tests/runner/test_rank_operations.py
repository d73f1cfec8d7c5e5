"""What an operator does to an engine over two ranks: every answer is that of an engine without other ranks, to which
the same was done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from rank_threads import ranks_in_threads
from real_app import write_model
from runner_driver import folder_source
from tiny_adapters import write_adapter

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest, LogprobSpec
from tureen.engine.engine import Engine
from tureen.errors import Conflict, InvalidRequest, NotFound
from tureen.runner import forward
from tureen.runner.load import load_runner
from tureen.runner.model_runner import ModelRunner
from tureen.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(b"Once a king")
LENGTH = 4
SETTINGS = {"dtype": "float32", "page_size": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Two models of one shape, one of another, an adapter of the first."""
    root = tmp_path_factory.mktemp("ranks")
    write_adapter(write_model(root / "first", 1), root / "adapter")
    write_model(root / "second", 2)
    write_model(root / "wider", 3, intermediate_size=128)
    return root


class Operated:
    """An engine and its answers, one after the other."""

    def __init__(self, runner: ModelRunner) -> None:
        self.engine = Engine(runner, make_byte_tokenizer(), eos_token_ids=(EOS,), token_budget=8)
        self.call = self.engine.call
        self.answers: list[tuple[tuple[int, ...], int]] = []  # tokens; how many of the prompt were cached
        self._num_requests = 0

    def begin(self, adapter: str = "", logprobs: LogprobSpec | None = None) -> None:
        self._num_requests += 1
        request = GenerateRequest(
            id=f"r{self._num_requests}",
            token_ids=PROMPT,
            params=SamplingParams(temperature=0.8, ignore_eos=True),
            max_new_tokens=LENGTH,
            seed=3,
            adapter=adapter,
            logprobs=logprobs,
        )
        self.engine.add(request)

    def drain(self) -> None:
        tokens, cached = [], 0
        while self.engine.has_work:
            for delta in self.engine.step():
                tokens += delta.token_ids
                cached = delta.usage.cached_tokens if delta.usage is not None else cached
        self.answers.append((tuple(tokens), cached))

    def ask(self, adapter: str = "") -> tuple[int, ...]:
        self.begin(adapter)
        self.drain()
        return self.answers[-1][0]

    def update(self, folder: Path) -> object:
        return self.call("update_weights", name="new", path=str(folder), format="safetensors", load_format=None)


Operation = Callable[[Operated], None]


@pytest.fixture(params=["tensor_parallel_size", "pipeline_parallel_size"])
def over_ranks(request) -> Callable[[Path, Operation], tuple[list, list[str]]]:
    """Does the same without other ranks and with a second one, which has a part of every layer, or some of the layers.
    Returns the answers, which must be equal, and what the second rank did."""
    has_stages = request.param == "pipeline_parallel_size"

    def compare(folder: Path, do: Operation) -> tuple[list, list[str]]:
        with one_process(folder) if has_stages else ranks_in_threads(folder, 1, **SETTINGS) as runner:
            undisturbed = Operated(runner)
            do(undisturbed)
        with ranks_in_threads(folder, 2, **SETTINGS, **({request.param: 2} if has_stages else {})) as runner:
            operated = Operated(runner)
            do(operated)
            operations = runner._ranks.operations
        assert operated.answers == undisturbed.answers
        return operated.answers, operations

    return compare


@contextmanager
def one_process(folder: Path) -> Iterator[ModelRunner]:
    """The model by torch; stages compute with its bits."""
    config = Config(device="cpu", kernels="torch", num_threads=1, max_total_tokens=256, **SETTINGS)
    runner = load_runner(folder_source(folder), config)
    yield runner
    runner.close()


def test_new_weights_reach_all_ranks_and_those_of_another_shape_none(over_ranks, folders):
    def do(operated: Operated) -> None:
        operated.ask()
        with pytest.raises(InvalidRequest, match="intermediate_size"):
            operated.update(folders / "wider")
        operated.ask()
        operated.update(folders / "second")
        operated.ask()
        operated.update(folders / "first")
        operated.ask()

    answers, operations = over_ranks(folders / "first", do)
    texts = [tokens for tokens, _ in answers]
    assert texts[0] == texts[1] == texts[3] != texts[2]
    assert [cached > 0 for _, cached in answers] == [False, True, False, False]
    assert operations == ["update_weights", "update_weights"]


def test_what_is_paused_goes_on_with_the_weights_that_all_ranks_have_then(over_ranks, folders):
    def do(operated: Operated) -> None:
        for mode in ("in_place", "retract"):
            for folder in ("second", "first"):
                operated.begin()
                for _ in range(3):  # two for the prompt
                    operated.engine.step()
                operated.call("pause", mode=mode)
                assert not operated.engine.has_work
                assert operated.update(folders / folder) == 1
                operated.call("resume")
                operated.drain()
        operated.begin()
        operated.engine.step()
        assert operated.call("pause", mode="abort") == 1
        operated.call("resume")
        operated.drain()
        operated.ask()

    answers, _ = over_ranks(folders / "first", do)
    assert [len(tokens) for tokens, _ in answers[-2:]] == [0, LENGTH]
    assert all(0 < len(tokens) < LENGTH for tokens, _ in answers[:-2])  # what came before the pause is not in them


@pytest.mark.parametrize(
    ("over_ranks", "tags"),
    [
        ("tensor_parallel_size", ["weights"]),
        ("tensor_parallel_size", ["kv_cache"]),
        ("pipeline_parallel_size", ["weights"]),
        ("pipeline_parallel_size", ["weights", "kv_cache"]),
    ],
    indirect=["over_ranks"],
)
def test_memory_that_was_given_back_comes_back_on_all_ranks(over_ranks, folders, tags):
    def do(operated: Operated) -> None:
        operated.call("load_adapter", name="red", path=str(folders / "adapter"))
        operated.ask(), operated.ask("red")
        operated.call("release_memory", tags=tags)
        operated.call("resume_memory", tags=tags)
        operated.ask(), operated.ask("red")

    answers, operations = over_ranks(folders / "first", do)
    texts = [tokens for tokens, _ in answers]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    assert [cached for _, cached in answers] == [0, 0, 0, 0]
    assert operations == ["load_adapter", "release_memory", "resume_memory"]


def test_weights_whose_files_have_changed_do_not_come_back_on_any_rank_and_others_do(over_ranks, folders, tmp_path):
    for number in (1, 2):
        shutil.copytree(folders / "first", tmp_path / str(number))
    numbers = iter((1, 2))

    def do(operated: Operated) -> None:
        path = tmp_path / str(next(numbers))
        operated.update(path)
        operated.call("release_memory", tags=["weights"])
        os.utime(path / "model.safetensors", (1, 1))
        with pytest.raises(Conflict, match="have changed"):
            operated.call("resume_memory", tags=["weights"])
        operated.update(folders / "second")
        operated.ask()

    _, operations = over_ranks(folders / "first", do)
    assert operations == ["update_weights", "release_memory", "update_weights"]


def test_an_adapter_that_was_unloaded_is_gone_from_all_ranks_and_its_folder_can_be_loaded_again(over_ranks, folders):
    def do(operated: Operated) -> None:
        operated.call("load_adapter", name="red", path=str(folders / "adapter"))
        operated.ask("red")
        operated.begin("red")
        with pytest.raises(Conflict, match="red"):
            operated.call("unload_adapter", name="red")
        operated.drain()
        operated.call("unload_adapter", name="red")
        with pytest.raises(NotFound):
            operated.begin("red")
        operated.ask()
        operated.call("load_adapter", name="blue", path=str(folders / "adapter"))
        operated.ask("blue")

    answers, operations = over_ranks(folders / "first", do)
    texts = [tokens for tokens, _ in answers]
    assert texts[0] == texts[1] == texts[3] != texts[2]
    assert operations == ["load_adapter", "unload_adapter", "load_adapter"]


def test_a_flush_leaves_nothing_cached_and_the_same_tokens(over_ranks, folders):
    def do(operated: Operated) -> None:
        operated.ask()
        operated.ask()
        operated.call("flush_cache")
        operated.ask()

    answers, operations = over_ranks(folders / "first", do)
    assert [cached > 0 for _, cached in answers] == [False, True, False]
    assert len({tokens for tokens, _ in answers}) == 1
    assert operations == ["forget"]


def test_a_request_whose_scores_cannot_be_made_leaves_no_rank_waiting(over_ranks, folders, monkeypatch):
    def do(operated: Operated) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(forward, "SCORE_LOGITS", 4 * VOCAB_SIZE)
            patch.setattr(Sampler, "score", lambda *_: {}["no scores"])
            operated.begin(logprobs=LogprobSpec(prompt_start=0))
            operated.drain()
        operated.call("flush_cache")
        operated.update(folders / "second")
        operated.ask()

    answers, operations = over_ranks(folders / "first", do)
    assert [len(tokens) for tokens, _ in answers] == [0, LENGTH]
    assert operations == ["forget", "update_weights"]


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_operation_that_no_rank_has_all_for_is_refused_with_the_flag(folders, field):
    flag = f"--{field.replace('_', '-')}"
    stages = {field: 2} if field == "pipeline_parallel_size" else {}
    with ranks_in_threads(folders / "first", 2, **SETTINGS, **stages) as runner:
        for op in ("weight", *(["start_expert_record"] if stages else [])):
            with pytest.raises(InvalidRequest, match=flag):
                runner.call(op)
        assert runner._ranks.operations == []
