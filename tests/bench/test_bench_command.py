"""The command line: what it refuses, and a whole run against a server without a model."""

import argparse
import json

import pytest

from tureen.bench.command import add_arguments, run, target_specs
from tureen.errors import TureenError


def _options(*arguments):
    parser = argparse.ArgumentParser(prog="bench")
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "sigle"], "unknown workload 'sigle'"),
        (["--backend", "tgi"], "--backend"),
        (["--concurrency", "0"], "at least 1"),
        (["--requests", "many"], "--requests"),
        (["--rate", "nan"], "above 0"),
        (["--rate", "-1"], "above 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        _options(*arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "ours"], "NAME=BACKEND@URL"),
        (["--target", "ours=vllm@http://x"], "backend must be one of"),
        (["--target", "a=tureen@http://x", "--target", "a=openai@http://y"], "its own name"),
        (["--target", "a=tureen@http://x", "--url", "http://y"], "leave --url out"),
        (["--target", "a=tureen@http://x", "--target", "b=tureen@http://y", "--pid", "1"], "--pid"),
        (["--target", "a=tureen@http://x", "--target", "b=tureen@http://y", "--start", "c=x"], "begins with NAME="),
        (["--url", "https://127.0.0.1:1"], "must be http://"),
        (["--url", "http://127.0.0.1:99999"], "port"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--json", "/nowhere/at/all/x.json"], "no such folder"),
        (["--workload", "offline,single"], "runs alone"),
        (["--workload", "start", "--url", "http://127.0.0.1:9"], "needs --start"),
        (["--workload", "single,start", "--url", "http://127.0.0.1:9"], "--workload start runs alone"),
    ],
)
def test_contradictions_are_refused_by_name(arguments, message):
    with pytest.raises(TureenError, match=message):
        run(_options(*arguments))


def test_targets_get_their_own_commands():
    options = _options(
        *("--target", "ours=tureen@http://x", "--target", "llama=llamacpp@http://y"),
        *("--start", "llama=llama-server --port=1"),
    )
    ours, llama = target_specs(options)
    assert "start" not in ours
    assert llama == {"name": "llama", "backend": "llamacpp", "url": "http://y", "start": "llama-server --port=1"}


def test_a_run_prints_a_table_and_writes_json(fake_server, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = (
        "--url",
        fake_server.url,
        "--workload",
        "single,prefill",
        "--quick",
        "--seed",
        "7",
        "--api-key",
        "secret",
    )
    assert run(_options(*arguments, "--json", str(file))) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[:4]] == [
        "workload",
        "single",
        "prefill-512",
        "prefill-2048",
    ]
    document = json.loads(file.read_text())
    single = document["results"][0]
    assert (single["requests"], single["output_tokens"], single["prompt_tokens"]) == (2, 64, 64)
    assert single["cached_tokens"] == 6
    assert single["client_cpu_s"] > 0
    assert single["server_cpu_s"] >= 0
    assert single["memory_mib"]["resident"] > 1
    assert min(single["memory_reads"].values()) > 0
    assert document["seed"] == 7
    assert "secret" not in file.read_text()


def test_several_targets_take_turns_and_are_compared(fake_server, capsys):
    arguments = ("--target", f"a=tureen@{fake_server.url}", "--target", f"b=llamacpp@{fake_server.url}")
    assert run(_options(*arguments, "--workload", "single", "--requests", "2", "--quick")) == 0
    kinds = ["b" if "n_predict" in body else "a" for body in fake_server.requests]
    warm_up = 4
    assert kinds[: 2 * warm_up] == ["a"] * warm_up + ["b"] * warm_up
    assert kinds[2 * warm_up :] == ["a", "a", "b", "b"] * 2
    assert "a/b" in capsys.readouterr().out
    prompts = [tuple(body.get("input_ids") or body["prompt"]) for body in fake_server.requests]
    assert len(set(prompts)) == len(prompts)


def test_mixed_arrivals_come_at_shares_of_the_capacity(fake_server, tmp_path):
    fake_server.token_s = 0.0005
    file = tmp_path / "out.json"
    assert run(_options("--url", fake_server.url, "--workload", "mixed", "--quick", "--json", str(file))) == 0
    results = json.loads(file.read_text())["results"]
    assert [r["workload"] for r in results] == ["mixed-capacity", "mixed-50%", "mixed-100%", "mixed-300%"]
    capacity = results[0]["request_s"]
    assert [r["rate"] for r in results[1:]] == pytest.approx([0.5 * capacity, capacity, 3 * capacity])
    assert all(r["goodput_request_s"] > 0 for r in results[1:])


def test_a_server_that_does_not_tell_its_vocabulary_needs_the_flag(fake_server):
    with pytest.raises(TureenError, match="--vocab"):
        run(_options("--backend", "sglang", "--url", fake_server.url + "/nowhere", "--quick"))


def test_a_server_is_asked_by_its_models_name_though_the_vocabulary_is_given(fake_server):
    assert run(_options("--backend", "openai", "--url", fake_server.url, "--vocab", "500", "--quick")) == 0
    assert {body["model"] for body in fake_server.requests} == {"m"}
    assert max(max(body["prompt"]) for body in fake_server.requests) < 500
