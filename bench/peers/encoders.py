"""Compares an encoder's embeddings with ONNX Runtime's and OpenVINO's: processor seconds, and how near the vectors are.

    python bench/peers/encoders.py FOLDER --tureen ".venv/bin/python -m tureen" > result.json

FOLDER holds a BERT of sentence-transformers in safetensors. Needs torch, transformers, onnx, onnxscript, onnxruntime
and openvino. The opponents get what sentence-transformers gives them: texts sorted by length, in padded batches of 32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import openvino
import torch
import transformers
from tokenizers import Tokenizer

PORT, BATCH, MOST_TOKENS = 31990, 32, 256
TEXTS = {"short": (512, 3, 30), "mixed": (256, 3, 150), "long": (128, 120, 150)}
"""Kind -> number of texts, and their least and greatest number of words."""
Forward = Callable[[np.ndarray, np.ndarray], np.ndarray]


def make_texts() -> dict[str, list[str]]:
    chosen, words = random.Random(1), Path("docs/api.md").read_text().split()
    texts: dict[str, list[str]] = {}
    for kind, (count, least, most) in TEXTS.items():
        sizes = [chosen.randint(least, most) for _ in range(count)]
        texts[kind] = [
            " ".join(words[at : at + size]) for size in sizes for at in [chosen.randrange(len(words) - size)]
        ]
    return texts


class States(torch.nn.Module):
    """The states of the last layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.model.embeddings(input_ids=input_ids)
        mask = (1 - attention_mask[:, None, None, :].float()) * -1e9
        for layer in self.model.encoder.layer:
            states = layer(states, mask)
            states = states[0] if isinstance(states, tuple) else states
        return states


def export(folder: Path, to: Path) -> None:
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    names, ids = ["input_ids", "attention_mask"], torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "states")}
    torch.onnx.export(
        States(model), (ids, ids), str(to), input_names=names, output_names=["states"], dynamic_axes=axes, dynamo=False
    )


def batches(token_ids: list[list[int]]) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    order = sorted(range(len(token_ids)), key=lambda index: -len(token_ids[index]))
    for at in range(0, len(order), BATCH):
        chosen = order[at : at + BATCH]
        ids = np.zeros((len(chosen), len(token_ids[chosen[0]])), np.int64)
        mask = np.zeros_like(ids)
        for row, index in enumerate(chosen):
            ids[row, : len(token_ids[index])] = token_ids[index]
            mask[row, : len(token_ids[index])] = 1
        yield chosen, ids, mask


def run_peer(forward: Forward, token_ids: list[list[int]]) -> tuple[float, np.ndarray]:
    """Returns the processor seconds of the second of two runs, and the vectors."""
    vectors: list[np.ndarray] = [np.empty(0)] * len(token_ids)
    for _ in range(2):
        began = time.process_time()
        for chosen, ids, mask in batches(token_ids):
            states = forward(ids, mask)
            means = (states * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
            for index, mean in zip(chosen, means, strict=True):
                vectors[index] = mean / np.linalg.norm(mean)
        seconds = time.process_time() - began
    return seconds, np.array(vectors)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_server(pid: int, texts: list[str]) -> tuple[float, np.ndarray]:
    body = json.dumps({"input": texts, "truncate_prompt_tokens": MOST_TOKENS}).encode()
    for _ in range(2):
        began = processor_seconds(pid)
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/embeddings", body)
        request.add_header("Content-Type", "application/json")
        answer = json.load(urllib.request.urlopen(request))
        seconds = processor_seconds(pid) - began
    return seconds, np.array([one["embedding"] for one in answer["data"]])


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health")
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"tureen ended with status {server.returncode}")


def peers(onnx: Path, threads: int) -> dict[str, Forward]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(onnx), options, providers=["CPUExecutionProvider"])
    found: dict[str, Forward] = {
        "onnxruntime": lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    }
    for precision in ("f32", "bf16"):
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        compiled = openvino.Core().compile_model(str(onnx), "CPU", settings)
        found[f"openvino {precision}"] = lambda ids, mask, compiled=compiled: compiled(
            {"input_ids": ids, "attention_mask": mask}
        )[0]
    return found


def compare(folder: Path, pid: int, onnx: Path, rounds: int) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MOST_TOKENS)
    threads = len(os.sched_getaffinity(0))
    opponents, results = peers(onnx, threads), []
    for kind, texts in list(make_texts().items()) * rounds:
        token_ids = [tokenizer.encode(text).ids for text in texts]
        found = {name: run_peer(forward, token_ids) for name, forward in opponents.items()}
        found["tureen"] = run_server(pid, texts)
        exact = found["onnxruntime"][1]
        cosines = {name: (vectors * exact).sum(axis=1) for name, (_, vectors) in found.items()}
        results.append(
            {
                "texts": kind,
                "tokens": sum(map(len, token_ids)),
                "processor_s": {name: round(seconds, 2) for name, (seconds, _) in found.items()},
                "least_cosine": {name: float(own.min()) for name, own in cosines.items()},
            }
        )
    return {"model": folder.name, "threads": threads, "rounds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tureen", default="tureen", help="the command")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    command = [*shlex.split(args.tureen), "serve", "--model-path", str(args.folder), "--port", str(PORT)]
    with tempfile.TemporaryDirectory() as folder:
        onnx = Path(folder) / "model.onnx"
        export(args.folder, onnx)
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(server)
            print(json.dumps(compare(args.folder, server.pid, onnx, args.rounds), indent=1))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
