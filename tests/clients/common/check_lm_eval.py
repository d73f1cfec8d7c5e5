"""lm-eval asks the server for log-probabilities and for text, through two of its backends."""

from __future__ import annotations

import json

import pytest

CLIENT = "lm-evaluation-harness"
PACKAGES = ("lm-eval",)

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOICES = """\
doc_to_target: 0
doc_to_choice: "{{options}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT = """\
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_punctuation: true}]
"""
QUESTIONS = [
    {"question": "The capital of France is", "options": [" Paris", " London"]},
    {"question": "The sun rises in the", "options": [" east", " banana"]},
    {"question": "Two plus two is", "options": [" four", " purple"]},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, kind, more in (("choose", "multiple_choice", CHOICES), ("write", "generate_until", TEXT)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, file=data, more=more))
    return str(folder)


@pytest.mark.parametrize(
    ("backend", "path"), [("local-completions", "/v1/completions"), ("sglang-generate", "/generate")]
)
def test_a_model_is_evaluated(url, tokenizer_folder, tasks, backend, path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    settings = {"model": "default", "base_url": url + path, "tokenizer": tokenizer_folder, "num_concurrent": 1}
    found = lm_eval.simple_evaluate(
        model=backend,
        model_args=settings | {"max_retries": 1, "tokenized_requests": True},
        tasks=["choose", "write"],
        task_manager=TaskManager(include_path=tasks),
        bootstrap_iters=0,
    )
    assert found["results"]["choose"]["acc,none"] >= 0.6
    assert len(found["samples"]["write"]) == len(QUESTIONS)
    assert all(one["resps"][0][0].strip() for one in found["samples"]["write"])
