"""Servers that start together pack one model: each has the same bytes, and one copy is kept."""

import shutil
import subprocess
import sys

import pytest
import tiny_models

GUARDS = ("runner", "kernels", "weights")

pytest.importorskip("tureen.kernels.cpu._native")


START = """
import hashlib, sys
from pathlib import Path
from tureen.config import Config
from tureen.runner import native, packed_copy
from tureen.runner.load import load_runner
from tureen.weights.source import ModelSource

native.LEAST_BYTES = 0
record, digest = native.record, hashlib.sha256()

def recording(tape, model, *rest):
    for name in sorted(rest[-1]):
        digest.update(packed_copy.bytes_of(rest[-1][name]))
    record(tape, model, *rest)

native.record = recording
source = ModelSource("model", Path(sys.argv[1]), "safetensors")
print("ready", flush=True)
sys.stdin.readline()
load_runner(source, Config(device="cpu", num_threads=1, max_total_tokens=512, quantization="int4",
                           download_dir=sys.argv[2]))
print(digest.hexdigest())
"""


def test_servers_that_start_together_do_each_other_no_harm(tmp_path):
    model, cache = tmp_path / "model", tmp_path / "cache"
    tiny_models.write(model, "qwen2")  # has biases: vectors that are not norms
    for _ in range(3):
        shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, "-c", START, str(model), str(cache)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        results = []
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            out, err = process.communicate()
            assert (process.returncode, err) == (0, "")
            results.append(out)
        assert len(set(results)) == 1
        assert len(list((cache / "packed").iterdir())) == 1
