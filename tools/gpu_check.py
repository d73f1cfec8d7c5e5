"""Parity tests and the offline benchmark on a CUDA device: `make gpu-check`. Says so where there is none.

Works with torch 2.11 to 2.13 on Python 3.11 and 3.12. The benchmark runs random weights in the shape of Llama-3.1-8B
(`--shape small` for a quick look) through the real engine, without HTTP, and writes one JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest
from tureen.engine.engine import Engine
from tureen.runner.load import load_runner
from tureen.text.tokenizer import from_folder
from tureen.weights.source import resolve_model

ROOT = Path(__file__).resolve().parent.parent

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "eos_token_id": [128001],
    "bos_token_id": 128000,
}
SMALL = LLAMA_3_1_8B | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096}
SHAPES = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "small": SMALL | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try this script without a GPU")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here (torch.cuda.is_available() is false); nothing was checked")
        return 0
    status = 0 if options.skip_tests else parity(options.device)
    result = benchmark(options.shape, options.device)
    print(json.dumps(result, indent=2))
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y-%m-%d')}-{options.shape}-{options.device}.json"
    (options.out / name).write_text(json.dumps(result, indent=2) + "\n")
    return status


def parity(device: str) -> int:
    """The tests that compare with transformers, on the device."""
    command = [sys.executable, "-m", "pytest", "tests/models", "tests/runner", "tests/sampling", "tests/attention"]
    return subprocess.call(command, cwd=ROOT, env=os.environ | {"TUREEN_TEST_DEVICE": device})


def benchmark(shape: str, device: str) -> dict[str, object]:
    """Decode at several batch sizes and one prefill, tokens per second, against the bandwidth bound."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), SHAPES[shape])
        config = Config(model_path=folder, load_format="dummy", device=device, context_length=8192)  # type: ignore[arg-type]
        source = resolve_model(folder, cache_dir=Path(folder) / "cache")
        started = time.monotonic()
        runner = load_runner(source, config)
        load_s = time.monotonic() - started
        engine = Engine(
            runner,
            from_folder(Path(folder)),
            eos_token_ids=(),
            max_queued=1024,
            token_budget=config.chunked_prefill_size if device == "cpu" else 4096,
            prefix_cache=False,
        )
        rows = [_timed(engine, concurrency, 128, 128) for concurrency in (1, 16, 64)]
        rows.append(_timed(engine, 1, 4096, 1))
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_s": round(load_s, 2),
        "runs": rows,
    }


def _timed(engine: Engine, concurrency: int, prompt_len: int, output_len: int) -> dict[str, float]:
    for round_number in range(2):  # the first round warms up
        for index in range(concurrency):
            ids = tuple((17 * index + 31 * position + round_number) % 4000 for position in range(prompt_len))
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output_len)
            engine.add(
                GenerateRequest(
                    id=f"{prompt_len}-{round_number}-{concurrency}-{index}",
                    token_ids=ids,
                    params=params,
                    max_new_tokens=output_len,
                    seed=0,
                )
            )
        started = time.monotonic()
        while engine.has_work:
            engine.step()
        elapsed = time.monotonic() - started
    return {
        "concurrency": concurrency,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "seconds": round(elapsed, 3),
        "output_tok_s": round(concurrency * output_len / elapsed, 1),
        "prompt_tok_s": round(concurrency * prompt_len / elapsed, 1),
    }


def write_model_folder(folder: Path, config: dict[str, object]) -> None:
    """config.json and a byte-level tokenizer; the weights are random (`load_format="dummy"`)."""
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main())
