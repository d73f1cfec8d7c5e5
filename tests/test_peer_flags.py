"""Flags of other servers: every one that they have is in the tables, and each verdict does what it says."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import msgspec
import pytest

from tureen import config
from tureen.cli import command_line as cli
from tureen.cli import peer_tables
from tureen.cli.commands.migrate import migrate, read_command
from tureen.cli.flags import CommandParser, load_config, subparsers
from tureen.cli.peer_tables import NAMES, Peer, Verdict, load_peer
from tureen.config import Config
from tureen.errors import StartupError

load_peers = functools.cache(peer_tables.load_peers)
make = cli.parser
own_flags_of = functools.cache(CommandParser.own_flags)
LISTS = Path(__file__).parent / "data" / "peers"
TAKES = {"no": {"nothing"}, "yes": {"one", "maybe"}, "many": {"many"}, "optional": {"maybe", "one"}}
"""What a peer's own list says of a flag's values, and how a row of ours may be written."""

OTHER_MEANING = {
    "--api-key-file",
    "--config",
    "--device",
    "--max-batch-size",
    "--max-total-tokens",
    "--otlp-endpoint",
}
"""Flags that this server has too, and some peer means otherwise: `tureen serve` goes by its own meaning."""

TWO_MEANINGS = {"-e", "-n", "-r"}
"""Flags that two peers mean otherwise, and nothing else: refused where the line does not tell whose it is."""


@pytest.fixture(autouse=True)
def tables_and_a_parser_that_are_made_once(monkeypatch):
    monkeypatch.setattr(peer_tables, "load_peers", load_peers)
    monkeypatch.setattr(CommandParser, "own_flags", own_flags_of)
    monkeypatch.setattr(cli, "parser", lambda arguments=(): parser() if arguments == ["serve"] else make(arguments))


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for name in Config.__struct_fields__:
        monkeypatch.delenv(f"{config.ENV_PREFIX}{name.upper()}", raising=False)


def flags_of(name: str) -> list[dict]:
    return json.loads((LISTS / f"{name}.json").read_text())["flags"]


@functools.cache
def parser() -> CommandParser:
    return make(["serve"])


@functools.cache
def serve_parser() -> CommandParser:
    return subparsers(parser())[1]


@functools.cache
def own_flags():
    return serve_parser().own_flags()


def started(*arguments: str) -> Config:
    return load_config(parser().parse_args(["serve", *arguments]))


def migrated(line: str) -> tuple[Config, list[str]]:
    """The settings that a command of a peer comes to, its ports and addresses aside, and what cannot be had."""
    result = migrate(read_command(line.split(), load_peers()))
    return started(*result.arguments), result.faults


def changes(found: Config, *but: str) -> dict:
    return {
        name: getattr(found, name)
        for name in Config.__struct_fields__
        if getattr(found, name) != getattr(Config(), name) and name not in but
    }


ROWS = [
    pytest.param(peer, verdict, id=f"{peer.title} {verdict.names[0]}")
    for peer in load_peers()
    for verdict in {id(verdict): verdict for verdict in peer.verdicts.values()}.values()
]


@pytest.mark.parametrize("name", NAMES)
def test_each_flag_of_a_peer_s_own_list_is_in_the_table(name):
    peer = load_peer(name)
    assert [flag["names"] for flag in flags_of(name) if not all(map(peer.find, flag["names"]))] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_of_the_version_that_the_list_is_of(name):
    listed = json.loads((LISTS / f"{name}.json").read_text())
    assert (load_peer(name).written.version, load_peer(name).written.command) == (listed["version"], listed["command"])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_takes_as_many_values_as_the_peer_does(name):
    peer = load_peer(name)
    wrong = [
        (spelling, verdict.takes, flag["value"])
        for flag in flags_of(name)
        for spelling in flag["names"]
        if (verdict := peer.find(spelling)) is not None
        and verdict.kind != "refused"
        and verdict.takes not in TAKES[flag["value"]]
    ]
    assert wrong == []


@pytest.mark.parametrize(("name", "least"), [("sglang", 80), ("vllm", 80), ("llamacpp", 80), ("tgi", 40)])
def test_the_flags_in_common_use_have_a_verdict_of_their_own(name, least):
    peer = load_peer(name)
    spelled = {word for words in peer.written.left_out.values() for word in words.split()}
    of_their_own = [flag for flag in flags_of(name) if not spelled.intersection(flag["names"])]
    assert len(of_their_own) >= least


def examples(verdict: Verdict) -> list[str]:
    """Values that a row is about."""
    row = verdict.row
    named = [*(row.only or ()), *(value for value in row.values if value != "*")]
    if row.form == "sampling":
        return ["0.5"]
    if verdict.takes == "nothing":
        return [""]
    shaped = {"json backend": '{"backend":"xgrammar"}', "classes": "a.b.C", "adapters": "a=b"}
    if row.form in shaped:
        return [shaped[row.form]]
    return named or ["7", "x", "0.5", '{"top_k":3}', "a=b", "4096"]


@pytest.mark.parametrize(("peer", "verdict"), ROWS)
def test_a_verdict_does_what_it_says(peer: Peer, verdict: Verdict, capsys):
    """Settings that a row's flag names change, others do not; a refusal tells its reason."""
    own = own_flags()
    for spelling in verdict.names:
        outcomes = []
        for value in examples(verdict):
            line = [spelling, *([value] if value else [])]
            result = migrate(read_command([*peer.written.command.split(), *line], load_peers()))
            if verdict.kind == "refused":
                assert [fault for fault in result.faults if verdict.row.why in fault and spelling in fault]
                break
            assert result.faults == []
            told = [note for note in result.notes if note.theirs == " ".join(line)]
            assert told
            try:
                found = changes(started(*result.arguments), "host", "port")
            except StartupError:  # this sample is no value of the setting
                continue
            fields = {own_field(flag) for flag in told[0].ours if flag in own} - {"host", "port"}
            assert found.keys() <= fields
            assert told[0].kind != "told" or not told[0].ours
            outcomes.append(found)
        capsys.readouterr()
        assert verdict.kind in ("refused", "told") or outcomes, "no sample fits: add one"


@functools.cache
def own_field(flag: str) -> str:
    return serve_parser()._option_string_actions[flag].dest


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("vllm serve m --max-model-len 4096", {"model_path": "m", "context_length": 4096}),
        ("vllm serve --model m --max-model-len 32k", {"model_path": "m", "context_length": 32000}),
        ("vllm serve m --max-model-len=32K", {"model_path": "m", "context_length": 32768}),
        ("vllm serve m --max_num_seqs 5", {"model_path": "m", "max_running_requests": 5}),
        ("vllm serve m --gpu-memory-utilization 0.9", {"model_path": "m", "mem_fraction_static": 0.9}),
        ("vllm serve m --served-model-name a b", {"model_path": "m", "served_model_name": "a"}),
        ("vllm serve m -tp 1 --enforce-eager --no-enforce-eager -O3", {"model_path": "m"}),
        ("vllm serve m --dtype half --seed 7", {"model_path": "m", "dtype": "float16", "random_seed": 7}),
        ("vllm serve m --quantization awq", {"model_path": "m"}),
        ("vllm serve m --spec-model head --spec-method eagle", {"model_path": "m"}),
        (
            "sglang serve --model-path m --speculative-draft-model-path head --speculative-algorithm EAGLE3",
            {"model_path": "m"},
        ),
        (
            "sglang serve --model-path m --speculative-draft-model head --speculative-draft-model-revision v2",
            {"model_path": "m"},
        ),
        ("llama-server -m m.gguf -md small.gguf", {"model_path": "m.gguf", "draft_model": "small.gguf"}),
        ("llama-server -m m.gguf -hfd a/b --draft-max 8", {"model_path": "m.gguf", "draft_model": "a/b:Q4_K_M"}),
        ("llama-server -m m.gguf --spec-draft-hf a/b:Q8_0", {"model_path": "m.gguf", "draft_model": "a/b:Q8_0"}),
        ("vllm serve m --no-enable-prefix-caching", {"model_path": "m", "disable_radix_cache": True}),
        (
            "vllm serve m --structured-outputs-config.backend xgrammar",
            {"model_path": "m", "grammar_backend": "xgrammar"},
        ),
        (
            """vllm serve m --lora-modules {"name":"a","path":"p"} b=q""",
            {"model_path": "m", "lora_paths": ("a=p", "b=q")},
        ),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", {"model_path": "m"}),
        ("python -m sglang.launch_server --model m --tp 1 --disable-overlap-schedule", {"model_path": "m"}),
        (
            "python -m sglang.launch_server --model m --skip-tokenizer-init --json-model-override-args {} "
            "--expert-distribution-recorder-mode stat --chat-template llama-2",
            {"model_path": "m", "chat_template": "llama-2"},
        ),
        # as the documentation pages of /generate have them
        ("python -m sglang.launch_server --model-path m --port 30000", {"model_path": "m"}),
        (
            "python3 -m sglang.launch_server --model-path m --tokenizer-path t --chat-template vicuna_v1.1",
            {"model_path": "m", "tokenizer_path": "t", "chat_template": "vicuna_v1.1"},
        ),
        (
            "python3 -m sglang.launch_server --model-path m --chat-template chatml-llava",
            {"model_path": "m", "chat_template": "chatml-llava"},
        ),
        (
            "python -m sglang.launch_server --model-path m --port 30000 --host 0.0.0.0 --grammar-backend outlines",
            {"model_path": "m", "grammar_backend": "outlines"},
        ),
        (
            "python -m sglang.launch_server --model-path m --port 30000 --enable-custom-logit-processor",
            {"model_path": "m", "enable_custom_logit_processor": True},
        ),
        ("python -m sglang.launch_server --model-path m --disable-overlap", {"model_path": "m"}),
        ("python -m sglang.launch_server --random-seed 3 --page-size 32", {"random_seed": 3, "page_size": 32}),
        (
            "sglang serve --model-path m --enable-lora --lora-paths a=b c=d",
            {"model_path": "m", "lora_paths": ("a=b", "c=d")},
        ),
        (
            "./llama-server -m m.gguf -c 4096 -np 4",
            {"model_path": "m.gguf", "context_length": 4096, "max_running_requests": 4},
        ),
        ("llama-server -hf a/b -c 0 -ngl 99", {"model_path": "a/b:Q4_K_M"}),
        ("llama-server -hf a/b:Q8_0 -ngl 0", {"model_path": "a/b:Q8_0", "device": "cpu"}),
        ("llama-server -m m --host /run/x.sock", {"model_path": "m", "uds": "/run/x.sock"}),
        ("llama-server --temp 0.7 --top-k 0", {"preferred_sampling_params": '{"temperature": 0.7, "top_k": -1}'}),
        ("llama-server -t 4 -ctk q8_0 -ctv q8_0", {"num_threads": 4, "kv_cache_dtype": "int8"}),
        ("text-generation-launcher --model-id m --max-total-tokens 2048", {"model_path": "m", "context_length": 2048}),
        (
            "text-generation-launcher --quantize bitsandbytes-nf4 --json-output",
            {"quantization": "int4", "log_format": "json"},
        ),
    ],
)
def test_a_command_of_a_peer_starts_the_server_that_it_asks_for(line, settings):
    found, faults = migrated(line)
    assert faults == []
    assert changes(found, "host", "port") == settings


@pytest.mark.parametrize(
    ("line", "listens"),
    [
        ("vllm serve m", ("0.0.0.0", 8000)),
        ("vllm serve m --host ::1 --port 9", ("::1", 9)),
        ("llama-server -m m", ("127.0.0.1", 8080)),
        ("python -m sglang.launch_server --model m", ("127.0.0.1", 30000)),
        ("text-generation-launcher --model-id m -p 81", ("0.0.0.0", 81)),
        (
            "docker run --gpus all -p 8081:80 -v d:/data ghcr.io/huggingface/text-generation-inference:3 --model-id m",
            ("0.0.0.0", 8081),
        ),
        ("docker run -d --ipc=host -p 9000:8000 vllm/vllm-openai:latest --model m --port 8000", ("0.0.0.0", 9000)),
        (
            "docker run lmsysorg/sglang:dev python3 -m sglang.launch_server --model-path m --host 0.0.0.0",
            ("0.0.0.0", 30000),
        ),
    ],
)
def test_a_translated_command_listens_where_the_peer_would(line, listens):
    found, faults = migrated(line)
    assert faults == []
    assert (found.host, found.port) == listens


@pytest.mark.parametrize("name", NAMES)
def test_defaults_that_differ_are_those_of_the_peer_s_own_list(name):
    listed = {spelling: flag.get("default") for flag in flags_of(name) for spelling in flag["names"]}
    for spelling, default in load_peer(name).written.defaults.items():
        theirs = listed.get(spelling, listed.get("--hostname"))
        assert default.value == str(theirs) or (name, spelling, theirs) == ("vllm", "--host", None)


@pytest.mark.parametrize(
    ("arguments", "setting", "told"),
    [
        (["--max-model-len", "512"], {"context_length": 512}, "here: --max-model-len 512 is --context-length 512"),
        (["--nnodes", "1"], {}, "without effect here: --nnodes 1 (a model runs on one machine)"),
        (
            ["--quantization", "fp8"],
            {},
            "without effect here: --quantization fp8 (a checkpoint that is quantised says so itself; "
            "one that is not stays unquantised without --quantization int8 or int4)",
        ),
        (["--tp", "2"], {"tensor_parallel_size": 2}, "here: --tp 2 is --tensor-parallel-size 2"),
        (["--pp-size", "3"], {"pipeline_parallel_size": 3}, "here: --pp-size 3 is --pipeline-parallel-size 3"),
        (["-pp", "3"], {"pipeline_parallel_size": 3}, "here: -pp 3 is --pipeline-parallel-size 3"),
        (["--enforce-eager", "--trust-remote-code"], {}, "without effect here: --enforce-eager ("),
        (["--attention-backend", "flashinfer"], {}, "without effect here: --attention-backend flashinfer"),
        (["--dtype", "half"], {"dtype": "float16"}, "--dtype half is --dtype float16"),
        (["--context-length", "4k"], {"context_length": 4000}, "--context-length 4k is --context-length 4000"),
        (["-n", "5", "-hf", "a/b"], {"model_path": "a/b:Q4_K_M"}, "-n 5 is --preferred-sampling-params"),
        (["--model-id", "m", "--max-total-tokens", "9"], {"model_path": "m", "max_total_tokens": 9}, "not TGI's"),
    ],
)
def test_serve_takes_flags_of_peers_and_tells_what_became_of_them_in_a_line_of_a_kind(capsys, arguments, setting, told):
    found = changes(started(*arguments), "preferred_sampling_params")
    assert found == setting
    lines = capsys.readouterr().err.splitlines()
    assert told in "\n".join(lines)
    assert len(lines) <= 2


def test_serve_says_nothing_and_reads_no_table_where_all_flags_are_its_own(capsys, monkeypatch):
    monkeypatch.setattr("tureen.cli.peer_tables.load_peers", None)
    assert changes(started("m", "--port", "7", "--no-packed-cache", "--lora-paths", "a=b", "--api-key=-x")) == {
        "model_path": "m",
        "port": 7,
        "packed_cache": False,
        "lora_paths": ("a=b",),
        "api_key": "-x",
    }
    assert capsys.readouterr().err == ""


def test_all_bad_flags_are_named_at_once_each_with_its_own_fix(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--prot", "1", "--nnodes", "8", "--engine", "thred", "--zzz", "--root-path", "/x", "--port"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1].split(" ")[0] for line in lines] == [
        "unknown", "--nnodes", "--engine", "unknown", "--root-path", "--port",
    ]  # fmt: skip
    assert lines[0].endswith("unknown argument --prot; did you mean --port?")
    assert "CUDA_VISIBLE_DEVICES" in lines[1] or "start a server on each" in lines[1]
    assert lines[2].endswith("--engine thred: it must be auto, thread, process")
    assert "did you mean" not in lines[3]
    assert "let a proxy strip the prefix" in lines[4]


@pytest.mark.parametrize("flag", sorted(TWO_MEANINGS))
def test_a_flag_that_two_peers_mean_otherwise_is_refused_with_both_meanings(capsys, flag):
    with pytest.raises(SystemExit):
        cli.main(["serve", flag, *(["5"] if flag != "-e" else [])])
    line = capsys.readouterr().err
    assert line.count("--") == 2
    assert "write which" in line


def test_flags_with_two_meanings_are_those_that_are_documented():
    own, peers = serve_parser()._option_string_actions, load_peers()
    other, two = set(), set()
    for name in sorted({name for peer in peers for name in peer.verdicts}):
        verdicts = [verdict for peer in peers if (verdict := peer.verdicts.get(name)) is not None]
        if name in own:
            meant = {own.get(verdict.row.to.split(" ")[0], own[name]).dest for verdict in verdicts}
            is_refused = any(verdict.kind == "refused" for verdict in verdicts)
            names_devices = name == "--device" and any(verdict.kind == "becomes" for verdict in verdicts)
            if meant != {own[name].dest} or is_refused or names_devices:
                other.add(name)
        elif not name.startswith("--") and len({(verdict.kind, verdict.row.to) for verdict in verdicts}) > 1:
            two.add(name)
    assert other == OTHER_MEANING
    assert two == TWO_MEANINGS
    page = (Path(__file__).parent.parent / "docs" / "command-line.md").read_text()
    assert [flag for flag in OTHER_MEANING | TWO_MEANINGS if f"`{flag}`" not in page] == []


def test_migrate_prints_a_reason_a_line_and_the_command_last(capsys):
    status = cli.main(
        ["migrate", "--", "vllm", "serve", "m", "--enforce-eager", "--max-model-len", "9", "--nnodes", "2"]
    )
    *reasons, command = capsys.readouterr().out.splitlines()
    assert status == 1
    assert command == "tureen serve m --context-length 9 --host 0.0.0.0 --port 8000"
    assert all(line.startswith("# ") for line in reasons)
    for part in ("--enforce-eager is left out", "--max-model-len 9 is --context-length 9", "NOT SUPPORTED: --nnodes 2"):
        assert [line for line in reasons if part in line]


def test_migrate_reads_one_text_with_continued_lines_and_writes_json(capsys):
    assert cli.main(["migrate", "--json", "CUDA_VISIBLE_DEVICES=1 vllm serve m \\\n  --port 1 --uds '/a b'"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == ["CUDA_VISIBLE_DEVICES=1", "tureen", "serve", "m", "--port", "1", "--uds", "/a b"]
    assert found["not_here"] == []


def test_a_container_s_variables_are_kept_and_the_rest_of_its_options_told(capsys):
    line = "docker run -v a:/b -e HF_TOKEN=x --env=A=1 -p 9:8000 vllm/vllm-openai --model m"
    assert cli.main(["migrate", line]) == 0
    *reasons, command = capsys.readouterr().out.splitlines()
    assert command == "HF_TOKEN=x A=1 tureen serve --model m --port 9 --host 0.0.0.0"
    assert [reason for reason in reasons if "the container is left out" in reason]


def test_the_value_of_a_flag_that_nobody_knows_is_not_taken_for_a_model(capsys):
    assert cli.main(["migrate", "--", "vllm", "serve", "m", "--sparkle", "7", "--port", "1", "--host", "::1"]) == 1
    *reasons, command = capsys.readouterr().out.splitlines()
    assert command == "tureen serve m --port 1 --host ::1"
    assert reasons[-1] == "# NOT SUPPORTED: unknown argument --sparkle"


def test_migrate_names_the_servers_that_it_knows(capsys):
    assert cli.main(["migrate", "--", "triton", "serve"]) == 1
    printed = capsys.readouterr().err
    assert "not 'triton serve'; it knows: " in printed
    assert "llama-server" in printed


def test_what_looks_like_a_secret_is_refused_without_being_shown(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "-hft", "hf_secret", "--hf-token", "hf_other"])
    printed = capsys.readouterr().err
    assert "hf_" not in printed
    assert printed.count("HF_TOKEN") == 2


@pytest.mark.parametrize("values", [("q8_0", "f32"), ("f32", "q8_0")])
def test_two_flags_that_ask_for_different_values_of_one_setting_are_refused(capsys, values):
    with pytest.raises(SystemExit):
        cli.main(["serve", "-ctk", values[0], "-ctv", values[1]])
    assert "-ctk and -ctv ask for different --kv-cache-dtype" in capsys.readouterr().err


def test_the_lists_name_their_source():
    for name in NAMES:
        listed = json.loads((LISTS / f"{name}.json").read_text())
        assert listed["source"]
        assert msgspec.json.encode(listed["flags"])
