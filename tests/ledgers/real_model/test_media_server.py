"""Pictures through a real server on a tiny checkpoint: the tokens of transformers, and nothing that may not be read."""

import base64
import contextlib
import io
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import tiny_llava
import torch
from server_process import ServerProcess, metric
from timeouts import wait_until

import tureen
from tureen.weights.source import load_tokenizer, resolve_model

GUARDS = ("media", "vision", "runner", "cache", "serving")


NEW_TOKENS = 12
PROMPT = "A chat. USER: <image>\nDescribe this picture ASSISTANT:"
FLAGS = ("--chat-template", "vicuna_v1.1", "--dtype", "float32", "--max-total-tokens", "4096", "--page-size", "4")
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


def _stored(picture, kind="PNG"):
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def _base64(picture):
    return base64.b64encode(_stored(picture)).decode()


PICTURES = [
    tiny_llava.picture(width, height, seed) for seed, (width, height) in enumerate([(40, 31), (60, 60), (9, 90)])
]


class Checkpoint:
    """A folder, and the transformers model that it holds."""

    def __init__(self, folder, variant):
        self.folder = folder / "model"
        self.oracle = tiny_llava.write(self.folder, variant)
        tiny_llava.write_tokenizer(self.folder)
        self.tokenizer = load_tokenizer(resolve_model(str(self.folder), cache_dir=folder))
        self.processor = tiny_llava.processor(variant)
        self.start = folder / "start"  # the server's directory
        self.start.mkdir()
        PICTURES[0].save(self.start / "example_image.png")

    @torch.no_grad()
    def expected(self, text, *pictures):
        """The tokens that transformers draws."""
        inputs = dict(self.processor(images=list(pictures), return_tensors="pt")) if pictures else {}
        per_picture = 0
        if pictures:
            features = self.oracle.get_image_features(**inputs)
            features = getattr(features, "pooler_output", features)
            per_picture = [len(one) for one in features]
        ids, counts = [], iter(per_picture or ())
        for token in self.tokenizer.encode(text):
            ids += [token] * (next(counts) if token == tiny_llava.IMAGE else 1)
        out = self.oracle.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            **inputs,
        )
        return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("llava"), "llava-clip")


@pytest.fixture(scope="module")
def tiled_checkpoint(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("next"), "next-vicuna")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """None of its processes can import torch."""
    hidden = tmp_path_factory.mktemp("hidden")
    for name in ("torch", "transformers"):
        (hidden / f"{name}.py").write_text("raise AssertionError('a server that takes pictures imports this')")
    path = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = ("--model-path", str(checkpoint.folder), *FLAGS)
    with ServerProcess(*flags, cwd=checkpoint.start, env={"PYTHONPATH": path}) as running:
        yield running.wait_ready()


def _post(server, status=200, **body):
    answer = httpx.post(f"{server.url}/generate", json={"sampling_params": GREEDY, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_file_a_data_url_and_base64_give_the_tokens_of_transformers(checkpoint, server):
    expected = checkpoint.expected(PROMPT, PICTURES[0])
    assert expected != checkpoint.expected(PROMPT, PICTURES[1])
    stored = _base64(PICTURES[0])
    absolute = checkpoint.start / "example_image.png"
    for given in ("example_image.png", str(absolute), f"file://{absolute}", f"data:image/png;base64,{stored}", stored):
        assert _post(server, text=PROMPT, image_data=given)["output_ids"] == expected, given[:40]


def test_a_batch_of_different_pictures_and_text_gives_the_tokens_of_transformers(checkpoint, server):
    texts = [PROMPT, "no picture here", "<image> and <image>", "USER: <image>"]
    pictures = [[PICTURES[1]], [], [PICTURES[2], PICTURES[0]], [PICTURES[2]]]
    given = [[_base64(one) for one in row] for row in pictures]
    answers = _post(server, text=texts, image_data=given)
    for text, row, answer in zip(texts, pictures, answers, strict=True):
        assert answer["output_ids"] == checkpoint.expected(text, *row)
    ids = [checkpoint.tokenizer.encode(text) for text in texts]
    answers_by_ids = _post(server, input_ids=ids, image_data=given)
    assert [one["output_ids"] for one in answers_by_ids] == [one["output_ids"] for one in answers]


def test_a_stream_gives_the_same_tokens(checkpoint, server):
    body = {"text": PROMPT, "image_data": "example_image.png", "sampling_params": GREEDY, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["output_ids"] == checkpoint.expected(PROMPT, PICTURES[0])


def test_the_prefix_cache_holds_a_picture_s_tokens_for_that_picture_alone(server):
    text = "The same text before <image> and behind it"
    httpx.post(f"{server.url}/flush_cache")
    cached = [
        _post(server, text=text, image_data=_base64(PICTURES[index]))["meta_info"]["cached_tokens"]
        for index in (0, 0, 1)
    ]
    before = text.index("<image>") // 4 * 4
    assert (cached[0], cached[2]) == (0, before)
    assert cached[1] > before + 4


def test_text_streams_go_on_beside_pictures(checkpoint, server):
    """What it gets is what it gets alone, and so do they."""
    body = {"text": "Once", "sampling_params": GREEDY | {"max_new_tokens": 300}}
    alone = _post(server, **body)["output_ids"]
    pictures = [tiny_llava.picture(50, 50, seed) for seed in range(20, 26)]
    answers = {}

    def ask(index):
        answers[index] = _post(server, text=PROMPT, image_data=_base64(pictures[index]))["output_ids"]

    with httpx.stream("POST", f"{server.url}/generate", json=body | {"stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        first = next(lines)
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(pictures))]
        for thread in threads:
            thread.start()
        events = [first, *lines]
        for thread in threads:
            thread.join()
    assert json.loads(events[-2].removeprefix("data: "))["output_ids"] == alone
    assert [answers[index] for index in range(len(pictures))] == [checkpoint.expected(PROMPT, one) for one in pictures]


def test_what_leaves_while_it_is_waited_for_leaves_nothing_behind(server):
    for timeout in (0.001, 0.01, 0.05):
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/generate", json={"text": PROMPT, "image_data": "example_image.png"}, timeout=timeout
            )
    wait_until(lambda: metric(server.url, "sglang:num_running_reqs") == 0, "the end of what runs")
    wait_until(lambda: metric(server.url, "sglang:num_used_tokens") == 0, "the end of what came late")


def test_the_server_says_which_chat_template_it_was_given(server):
    assert httpx.get(f"{server.url}/server_info").json()["chat_template"] == "vicuna_v1.1"
    assert httpx.get(f"{server.url}/model_info").json()["has_image_understanding"] is True


# ---- what may not be read


@pytest.fixture
def forbidden(checkpoint, tmp_path):
    """Names of files that are there and must not be told from those that are not."""
    start = checkpoint.start
    secret = tmp_path / "secret.png"
    PICTURES[0].save(secret)
    links = start / "link.png", start / "pipe.png", start / "folder"
    links[0].symlink_to(secret)
    os.mkfifo(links[1])
    links[2].mkdir()
    yield [
        "/proc/self/environ",
        "/etc/passwd",
        "file:///etc/passwd",
        "/dev/zero",
        f"../{checkpoint.folder.name}/config.json",
        str(secret),
        "link.png",
        "pipe.png",
        "./folder",
        "not-there.png",
        "./example_image.png/../example_image.png",
    ]
    links[0].unlink()
    links[1].unlink()
    links[2].rmdir()


def test_files_that_may_not_be_read_are_all_refused_alike(server, forbidden):
    messages = set()
    for name in forbidden:
        error = _post(server, 403, text=PROMPT, image_data=name)["error"]
        assert (error["code"], error["param"]) == ("local_media_disabled", "image_data")
        messages.add(error["message"])
    assert len(messages) == 1
    assert not re.search(r"/(tmp|proc|etc|root|home|work)", messages.pop())


def test_no_url_reaches_this_machine(server):
    asked = []

    class Canary(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(_stored(PICTURES[0]))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Canary) as canary:
        threading.Thread(target=canary.serve_forever, daemon=True).start()
        port = canary.server_port
        urls = [
            f"http://{host}:{port}/x.png"
            for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "2130706433", "0177.0.0.1", "[::ffff:127.0.0.1]")
        ]
        urls += [f"http://images.example.com@127.0.0.1:{port}/x.png", f"HTTP://127.0.0.1:{port}\\x.png"]
        for url in urls:
            error = _post(server, 403, text=PROMPT, image_data=url)["error"]
            assert error["code"] == "media_url_forbidden", url
            _post(server, text=f"see ![x]({url}) and {url}")
        _post(server, 403, text=["<image>", "<image>"], image_data=["example_image.png", urls[0]])
        canary.shutdown()
    assert asked == []


def test_a_server_without_a_folder_reads_no_file(checkpoint):
    arguments = ("--model-path", str(checkpoint.folder), *FLAGS, "--media-path", "")
    with ServerProcess(*arguments, cwd=checkpoint.start) as running:
        running.wait_ready()
        error = _post(running, 403, text=PROMPT, image_data="example_image.png")["error"]
        assert error["code"] == "local_media_disabled"
        assert _post(running, text=PROMPT, image_data=_base64(PICTURES[0]))["output_ids"]


# ---- without a server


@pytest.mark.parametrize(("kind", "mode"), [("tiled_checkpoint", "thread"), ("checkpoint", "process")])
def test_the_offline_engine_takes_pictures(kind, mode, monkeypatch, request):
    checkpoint = request.getfixturevalue(kind)
    monkeypatch.chdir(checkpoint.start)
    settings = {"dtype": "float32", "max_total_tokens": 4096, "engine": mode}
    with tureen.Engine(model_path=str(checkpoint.folder), **settings) as engine:
        answer = engine.generate(PROMPT, GREEDY, image_data="example_image.png")
        assert answer["output_ids"] == checkpoint.expected(PROMPT, PICTURES[0])
        texts = [PROMPT, PROMPT]
        batch = engine.generate(texts, GREEDY, image_data=[_base64(PICTURES[1]), "example_image.png"])
        assert batch[1]["output_ids"] == answer["output_ids"]
        assert batch[0]["output_ids"] == checkpoint.expected(PROMPT, PICTURES[1])
        *_, last = engine.generate(PROMPT, GREEDY, image_data="example_image.png", stream=True)
        assert last["output_ids"] == answer["output_ids"]
