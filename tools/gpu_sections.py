"""The sections of tools/gpu_check.py."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gpu_predictions as predicted
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tureen.attention.base import LayerShape
from tureen.attention.triton import _agrees
from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest
from tureen.engine.engine import Engine
from tureen.extras import is_installed
from tureen.kernels.fused import find_fused
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
TOKENS = 4000
"""Token ids of prompts are below."""
COPY_BYTES, PRODUCT_SIZE = 1 << 31, 8192


class Figure(NamedTuple):
    """A line of the table."""

    name: str
    value: float
    unit: str
    prediction: float | None = None


class Bench:
    """A device, and the engines on it, each loaded when it is first needed."""

    def __init__(self, shape: str, device: str, folder: Path) -> None:
        self.shape = shape
        self.device = device
        self._folder = folder
        write_model_folder(folder, SHAPES[shape])

    @property
    def card(self) -> predicted.Card | None:
        """The data sheet of the card, where it is known and the model is the one that predictions are for."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else ""
        known = [card for key, card in predicted.CARDS.items() if key in name]
        return known[0] if known and self.shape == "llama-3.1-8b" else None

    @functools.cache  # noqa: B019  one bench, for the whole run
    def engine(self, kernels: str = "auto") -> Engine:
        config = Config(
            model_path=str(self._folder),
            load_format="dummy",
            device=self.device,  # type: ignore[arg-type]
            kernels=kernels if self.device == "cuda" else "auto",  # type: ignore[arg-type]
            context_length=8192,
            max_running_requests=256,
        )
        source = resolve_model(str(self._folder), cache_dir=self._folder / "cache")
        budget = config.chunked_prefill_size if self.device == "cpu" else 4096
        return Engine(
            load_runner(source, config),
            from_folder(self._folder),
            eos_token_ids=(),
            max_queued=1024,
            token_budget=budget,
            prefix_cache=False,
        )

    def outputs(self, requests: list[GenerateRequest], kernels: str = "auto") -> tuple[dict[str, list[int]], float]:
        """Returns the output of each request, all at a time, and the seconds."""
        engine = self.engine(kernels)
        tokens: dict[str, list[int]] = {}
        for request in requests:
            engine.add(request)
        started = time.monotonic()
        while engine.has_work:
            for delta in engine.step():
                tokens.setdefault(delta.id, []).extend(delta.token_ids)
        return tokens, time.monotonic() - started


def requests(number: int, prompt_len: int, output_len: int, *, temperature: float = 0.0) -> list[GenerateRequest]:
    """Returns requests with different prompts. Their ids begin with the sizes."""
    params = SamplingParams(temperature=temperature, ignore_eos=True, max_new_tokens=output_len)
    return [
        GenerateRequest(
            id=f"{index}",
            token_ids=tuple((17 * index + 31 * position) % TOKENS for position in range(prompt_len)),
            params=params,
            max_new_tokens=output_len,
            seed=index,
        )
        for index in range(number)
    ]


def ceilings(bench: Bench) -> Iterator[Figure]:
    """The speed of a copy and of a large product."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = best_time(lambda: target.copy_(source), bench.device)
    yield Figure("copy", 2 * COPY_BYTES / seconds / 1e12, "TB/s", bench.card and bench.card.bytes_s / 1e12)
    size = PRODUCT_SIZE if bench.device == "cuda" else 512
    a = torch.randn(size, size, dtype=torch.bfloat16, device=bench.device)
    seconds = best_time(lambda: a @ a, bench.device)
    limit = bench.card and bench.card.operations_s / 1e12
    yield Figure("product of bfloat16", 2 * size**3 / seconds / 1e12, "TFLOP/s", limit)


def kernels(bench: Bench) -> Iterator[Figure]:
    """Triton's kernels against their references, and the bits of a row alone and among others. 1 = they agree."""
    if bench.device != "cuda" or not is_installed("triton"):
        raise RuntimeError("kernels need a CUDA device and Triton")
    from tureen.kernels.triton import linear, variants  # noqa: PLC0415  without Triton the others go on

    device, dtype = torch.device("cuda"), torch.bfloat16
    yield Figure("norms and activations", float(find_fused(device, dtype, 4096) is not None), "agree", 1)
    like = torch.zeros(1, dtype=dtype, device=device)
    for name, shape in variants.SHAPES.items():
        layer = LayerShape(*shape, has_sinks=name in variants.WITH_SINKS)
        yield Figure(f"attention of {name}", float(_agrees(layer, variants.PAGE_SIZE, like)), "agree", 1)
    for name, (outputs, inputs) in variants.MATRICES.items():
        x = torch.randn(300, inputs, device=device).to(dtype)
        weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
        alone = linear.linear(x[:1], weight)
        same = [torch.equal(linear.linear(x[:rows], weight)[:1], alone) for rows in (*linear.TOKENS, 300)]
        yield Figure(f"{name}: a row's bits in every width of tile", float(all(same)), "agree", 1)
        error = (linear.linear(x, weight).double() - x.double() @ weight.double().T).abs().max().item()
        yield Figure(f"{name}: largest error", error, "")
        for rows in (1, 64):
            own = best_time(functools.partial(linear.linear, x[:rows], weight), bench.device)
            torchs = best_time(functools.partial(torch.nn.functional.linear, x[:rows], weight), bench.device)
            yield Figure(f"{name}: {rows} rows, time over PyTorch's", own / torchs, "")


def decode(bench: Bench) -> Iterator[Figure]:
    """Output tokens a second, as the server decodes."""
    yield from rates(bench, "auto", predicted.PATHS[predicted.BEST])


def plain(bench: Bench) -> Iterator[Figure]:
    """The same with --kernels torch: no graphs and no Triton."""
    for rows, num_prompt, num_output in predicted.RUNS[:2]:
        yield rate(bench, "torch", rows, num_prompt, num_output)


def rates(bench: Bench, how: str, path: predicted.Path) -> Iterator[Figure]:
    for rows, num_prompt, num_output in predicted.RUNS:
        card = bench.card
        expected = card and predicted.output_rate(card, path, rows, num_prompt, num_output)
        yield rate(bench, how, rows, num_prompt, num_output)._replace(prediction=expected)


def rate(bench: Bench, how: str, rows: int, num_prompt: int, num_output: int) -> Figure:
    asked = requests(rows, num_prompt, num_output)
    bench.outputs(asked, how)  # compiles, and captures
    _, seconds = bench.outputs(asked, how)
    return Figure(f"{rows} streams, {num_prompt} in and {num_output} out", rows * num_output / seconds, "tok/s")


def prompt(bench: Bench) -> Iterator[Figure]:
    """Prompt tokens a second of one prompt."""
    asked = requests(1, 4096, 1)
    bench.outputs(asked)
    _, seconds = bench.outputs(asked)
    card = bench.card
    yield Figure("prompt of 4,096", 4096 / seconds, "tok/s", card and 4096 / predicted.prompt(card, 4096).seconds)


def seeds(bench: Bench) -> Iterator[Figure]:
    """Whether the same seed gives the same tokens alone and among others. 1 = all do."""
    for temperature in (0.0, 0.9):
        asked = requests(64, 100, 24, temperature=temperature)
        together, _ = bench.outputs(asked)
        same = [bench.outputs([each])[0][each.id] == together[each.id] for each in asked[:8]]
        yield Figure(f"temperature {temperature}: alone as among 64", sum(same) / len(same), "of 1", 1)


def tests(bench: Bench) -> Iterator[Figure]:
    """The tests that compare with transformers, on the device. 0 = they pass."""
    command = [sys.executable, "-m", "pytest", "tests/models", "tests/runner", "tests/sampling", "tests/attention"]
    environment = os.environ | {"TUREEN_TEST_DEVICE": bench.device, "TRITON_INTERPRET": "0"}
    yield Figure("exit status of the tests", subprocess.call(command, cwd=ROOT, env=environment), "", 0)


SECTIONS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "ceilings": ceilings,
    "kernels": kernels,
    "decode": decode,
    "prompt": prompt,
    "seeds": seeds,
    "plain": plain,
    "tests": tests,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the sections")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try this script without a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = sorted(set(chosen) - SECTIONS.keys())
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the sections are {', '.join(SECTIONS)}")
    if options.list:
        print(*(f"{name}: {section.__doc__}" for name, section in SECTIONS.items()), sep="\n")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here (torch.cuda.is_available() is false); nothing was checked")
        return 0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        bench = Bench(options.shape, options.device, Path(folder))
        figures, failed = run(bench, chosen)
    report(bench, figures, failed, options.out)
    return 1 if failed else 0


def run(bench: Bench, chosen: list[str]) -> tuple[dict[str, list[Figure]], dict[str, str]]:
    """Runs sections; returns the figures of each, and the last line of what failed."""
    figures: dict[str, list[Figure]] = {}
    failed: dict[str, str] = {}
    for name in chosen:
        print(f"--- {name}", flush=True)
        own = figures.setdefault(name, [])
        try:
            for figure in SECTIONS[name](bench):
                own.append(figure)
                print(line(figure), flush=True)
        except Exception as error:  # noqa: BLE001  a section that fails does not stop the others
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
    return figures, failed


def report(bench: Bench, figures: dict[str, list[Figure]], failed: dict[str, str], out: Path) -> None:
    """Prints the table, and writes it as JSON."""
    device = torch.cuda.get_device_name() if bench.device == "cuda" else platform.processor() or "cpu"
    print(f"\n{device}, torch {torch.__version__}, Python {platform.python_version()}, {bench.shape}")
    for name, own in figures.items():
        print(name, *map(line, own), *([f"  failed: {failed[name]}"] if name in failed else []), sep="\n")
    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    facts |= {"shape": bench.shape, "failed": failed}
    facts["sections"] = {name: [figure._asdict() for figure in own] for name, own in figures.items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{time.strftime('%Y-%m-%d')}-{bench.shape}-{bench.device}.json").write_text(
        json.dumps(facts, indent=2) + "\n"
    )


def line(figure: Figure) -> str:
    expected = "" if figure.prediction is None else f"   predicted {figure.prediction:,.4g}"
    return f"  {figure.name:<45} {figure.value:>12,.4g} {figure.unit}{expected}"


def best_time(function: Callable[[], object], device: str) -> float:
    """Returns the least seconds of a call, of several."""
    times = []
    for _ in range(7):
        started = time.monotonic()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    return min(times)


def write_model_folder(folder: Path, config: dict[str, object]) -> None:
    """config.json and a byte-level tokenizer; the weights are random (`load_format="dummy"`)."""
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
