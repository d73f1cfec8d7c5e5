"""The requests of training libraries, as their public code sends them, get the status and the fields that it reads.

tests/golden/training has them by library, one after another. `$MODEL`, `$ADAPTER` and `$NAME` stand for the server's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_app import RealApp, write_model
from tiny_adapters import write_adapter

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "training"
FILES = sorted(GOLDEN.glob("*.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("training")
    write_adapter(write_model(root / "model", 1), root / "adapter", seed=3)
    return root


@pytest.fixture(scope="module")
def app(folder):
    with RealApp(folder / "model", kernels="torch", chat_template="chatml", served_model_name="policy") as running:
        yield running


def filled(value, folder):
    """The value with the server's own names."""
    text = json.dumps(value)
    names = {"$MODEL": str(folder / "model"), "$ADAPTER": str(folder / "adapter"), "$NAME": "policy"}
    for name, own in names.items():
        text = text.replace(name, own)
    return json.loads(text)


def read(answer, path):
    for key in path.split("."):
        answer = answer[int(key)] if isinstance(answer, list) else answer[key]
    return answer


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_library_s_requests_get_the_fields_that_it_reads(app, folder, file):
    for step in json.loads(file.read_text(encoding="utf-8"))["steps"]:
        body = {} if "body" not in step else {"json": filled(step["body"], folder)}
        response = app.request(step["method"], step["path"], **body)
        assert response.status_code == step["status"], (step, response.text)
        if "answer" in step or "reads" in step:
            answer = response.json()
            assert answer | step.get("answer", {}) == answer if isinstance(answer, dict) else True, (step, answer)
            for path in step.get("reads", ()):
                assert read(answer, path) is not None, (step, path, answer)


def test_each_library_has_its_requests():
    assert {file.stem for file in FILES} == {"areal", "skyrl", "slime", "trl"}
