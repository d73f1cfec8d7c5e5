"""The k-th call that needs a file, memory or a thread fails while pictures, weights and adapters are loaded, or packed
weights are kept: the request at hand is told, what was there before serves on."""

import asyncio
import base64
import builtins
import errno
import io
import mmap
import os
import shutil
import threading

import numpy as np
import pytest
import tiny_llava
from app_under_test import ThreadedApp
from byte_tokenizer import VOCAB_SIZE
from kth_call import Site, assert_nothing_left, children, each_failure, held, no_more
from PIL import Image
from real_app import RealThreadedApp, write_model
from runner_driver import folder_source
from samples import either
from tiny_adapters import write_adapter

from tureen.config import Config
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.media.loader import MediaLoader
from tureen.runner import native as native_runner
from tureen.runner.load import load_runner

pytestmark = pytest.mark.sampled

STEP = either(1, 3)
"""The gate fails the first two calls, then every third."""

OPEN = Site(os, "open", no_more(errno.EMFILE))
BUILTIN_OPEN = Site(builtins, "open", no_more(errno.EMFILE))
DUP = Site(os, "dup", no_more(errno.EMFILE))
MMAP = Site(mmap, "mmap", no_more(errno.ENOMEM))
THREAD = Site(threading.Thread, "start", lambda: RuntimeError("can't start new thread"))
EMPTY = Site(np, "empty", MemoryError)
FROM_BUFFER = Site(np, "frombuffer", MemoryError)
ZEROS = Site(np, "zeros", MemoryError)
ARRAY = Site(np, "array", MemoryError)
READ = Site(os, "preadv", no_more(errno.EIO))


# ---- pictures


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A server whose model sees, with a picture below its media path, and a body that names it."""
    root = tmp_path_factory.mktemp("pictures")
    file = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(file, "PNG")
    (root / "red.png").write_bytes(file.getvalue())
    clip = {**tiny_llava.CLIP, "model_type": "clip_vision_model"}
    hf = {"model_type": "llava", "vision_config": clip, "text_config": {}, "image_token_index": VOCAB_SIZE}
    loader = MediaLoader(hf, tiny_llava.PREPROCESSORS["llava-clip"], media_path=root, allowed_domains=())
    with ThreadedApp(media=loader, special=("<image>",)) as app:
        inline = base64.b64encode(file.getvalue()).decode()
        body = {"text": "<image> say", "image_data": None, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        app.bodies = [body | {"image_data": one} for one in (inline, "red.png")]
        for each in app.bodies:
            app.generate(**each)
        yield app
        app.check_idle()


@pytest.mark.parametrize(
    "site",
    [
        OPEN,
        BUILTIN_OPEN,
        FROM_BUFFER,
        THREAD,
        Site(os, "fstat", no_more(errno.EIO)),
        Site(os, "pidfd_open", no_more(errno.EMFILE)),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1], ids=["inline", "file"])
def test_a_picture_that_cannot_be_had_fails_its_request_alone(seeing, site, place):
    body = seeing.bodies[place]
    expected = seeing.generate(**body)["output_ids"]
    before, others = held(), children()

    def work(failing):
        with failing.armed():
            found = seeing.post(**body)
            if found.status_code == 200:
                assert found.json()["output_ids"] == expected
            else:
                assert found.json()["error"]["code"], found.text
            assert seeing.generate(text="say:plain")["text"] == "plain"
        assert seeing.client.failure is None
        assert seeing.generate(**body)["output_ids"] == expected

    each_failure(site, work, step=STEP)
    assert children() <= others
    assert_nothing_left(before)


# ---- weights and adapters


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A server of one model; the folder of another one, and of an adapter."""
    if native.load() is None:
        pytest.skip("no native kernels")
    root = tmp_path_factory.mktemp("weights")
    model = write_model(root / "red", 1)
    write_model(root / "blue", 2)
    write_adapter(model, root / "adapter", seed=3)
    with RealThreadedApp(root / "red", kernels="native", engine="thread", max_total_tokens=1024) as app:
        app.root = root
        app.run(all_threads())
        yield app


async def all_threads():
    """Has the event loop start all threads that it may."""
    count = min(32, os.cpu_count() + 4)
    together = threading.Barrier(count)
    await asyncio.gather(*(asyncio.to_thread(together.wait) for _ in range(count)))


def output(app, **fields):
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return app.generate(input_ids=[17, 4, 99, 120], sampling_params=params, **fields)["output_ids"]


LOADING = [OPEN, BUILTIN_OPEN, DUP, MMAP, EMPTY, FROM_BUFFER, THREAD]


@pytest.mark.parametrize("site", LOADING, ids=str)
def test_weights_that_cannot_be_loaded_leave_those_that_are_served(serving, site, caplog):
    expected = output(serving)
    before = held()

    def update(name):
        return serving.post("/update_weights_from_disk", model_path=str(serving.root / name))

    def work(failing):
        with failing.armed():
            found = update("blue")
        if found.status_code == 200:
            assert output(serving) != expected
            assert update("red").status_code == 200
        else:
            assert found.json()["error"]["code"], found.text
        assert serving.client.health.num_replacements == 0, "the engine was lost"
        assert output(serving) == expected

    each_failure(site, work, step=STEP)
    caplog.clear()  # it holds errors, and they what their frames hold
    assert_nothing_left(before)


@pytest.mark.parametrize("site", LOADING, ids=str)
def test_an_adapter_that_cannot_be_loaded_leaves_all_as_it_was(serving, site, caplog):
    expected = output(serving)
    before = held()

    def load():
        return serving.post("/load_lora_adapter", lora_name="late", lora_path=str(serving.root / "adapter"))

    def work(failing):
        with failing.armed():
            found = load()
        if found.status_code != 200:
            assert found.json()["error"]["code"], found.text
            assert load().status_code == 200, "it cannot be loaded any more"
        assert output(serving, lora_path="late") != expected
        assert serving.post("/unload_lora_adapter", lora_name="late").status_code == 200
        assert output(serving) == expected
        assert serving.client.health.num_replacements == 0, "the engine was lost"

    each_failure(site, work, step=STEP)
    caplog.clear()
    assert_nothing_left(before)


@pytest.mark.parametrize("site", [EMPTY, FROM_BUFFER, ZEROS, ARRAY], ids=str)
def test_memory_that_a_step_cannot_have_costs_no_output(serving, site):
    with RealThreadedApp(serving.root / "red", kernels="native", engine="thread", max_total_tokens=1024) as app:
        expected = output(app)

        def work(failing):
            with failing.armed():
                assert output(app) == expected
            app.wait_until(lambda: app.client.health.state == "healthy")
            assert output(app) == expected
            app.check_idle()

        each_failure(site, work, step=STEP)


# ---- the copy of packed weights


@pytest.fixture(scope="module")
def starting(tmp_path_factory):
    """`start()` loads a model; `copies()` are what it kept of the packed weights."""
    if native.load() is None:
        pytest.skip("no native kernels")
    root = tmp_path_factory.mktemp("packed")
    write_model(root / "model", 1)

    class Starting:
        cache = root / "cache"

        def start(self):
            config = Config(
                device="cpu", num_threads=2, max_total_tokens=512, quantization="int4", download_dir=str(self.cache)
            )
            load_runner(folder_source(root / "model"), config)

        def copies(self):
            return {file.name: file.read_bytes() for file in (self.cache / "packed").glob("*")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_runner, "LEAST_BYTES", 0)
        yield Starting()


def starts(starting):
    try:
        starting.start()
    except (StartupError, OSError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(
    "site",
    [
        OPEN,
        BUILTIN_OPEN,
        READ,
        Site(os, "fsync", no_more(errno.ENOSPC)),
        Site(os, "replace", no_more(errno.EACCES)),
        Site(os, "utime", no_more(errno.EACCES)),
        Site(os, "fstat", no_more(errno.EIO)),
        THREAD,
    ],
    ids=str,
)
@pytest.mark.parametrize("is_there", [False, True], ids=["written", "read"])
def test_a_copy_that_cannot_be_written_or_read_costs_no_start_and_leaves_no_half_of_it(starting, site, is_there):
    shutil.rmtree(starting.cache, ignore_errors=True)
    starting.start()
    whole = starting.copies()
    assert len(whole) == 1
    before = held()

    def work(failing):
        if not is_there:
            shutil.rmtree(starting.cache)
        with failing.armed():
            has_started = starts(starting)
        assert has_started or failing.has_failed
        assert starting.copies() in ({}, whole) if starting.cache.exists() else not is_there
        starting.start()
        assert starting.copies() == whole

    each_failure(site, work, step=STEP)
    assert_nothing_left(before)
