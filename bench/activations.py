"""Measures what inputs of 16 bits cost: processor seconds of the default model with int8 and with int16, in turns.

    python bench/activations.py --rounds 5 --json bench/results/DATE-activations.json

Processor time changes little with what else runs on the machine, unlike wall time. One thread computes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import tureen

KINDS = ("int8", "int16")
WORK = {"one stream": (1, 32, 64), "16 streams": (16, 32, 32), "64 streams": (64, 32, 16), "prompt of 512": (1, 512, 1)}
"""Name -> requests at a time, prompt tokens, output tokens."""


def measured(engine: tureen.Engine, count: int, prompt: int, output: int, seed: int) -> float:
    """Returns processor seconds for a token: of the output, or of the prompt where one token is all that comes."""
    rng = random.Random(seed)
    ids = [[rng.randrange(3, 40_000) for _ in range(prompt)] for _ in range(count)]
    params = {"temperature": 0, "ignore_eos": True}
    if output > 1:  # the prompts are in the prefix cache then
        engine.generate(input_ids=ids, sampling_params=params | {"max_new_tokens": 1})
    began = time.process_time()
    engine.generate(input_ids=ids, sampling_params=params | {"max_new_tokens": output})
    return (time.process_time() - began) / (count * output if output > 1 else prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in WORK}
    engines = {kind: tureen.Engine(activations=kind, num_threads=1, max_total_tokens=16384) for kind in KINDS}
    try:
        for number in range(args.rounds):
            for name, work in WORK.items():
                for kind in KINDS:
                    seconds[name][kind].append(measured(engines[kind], *work, seed=number))
    finally:
        for engine in engines.values():
            engine.shutdown()
    results: dict[str, Any] = {}
    for name, by_kind in seconds.items():
        ratios = [wide / narrow for narrow, wide in zip(by_kind["int8"], by_kind["int16"], strict=True)]
        medians = {kind: 1000 * statistics.median(values) for kind, values in by_kind.items()}
        results[name] = {"ms a token": medians, "ratios": sorted(ratios), "ratio": statistics.median(ratios)}
        print(f"{name:14} {medians['int8']:8.2f} {medians['int16']:8.2f} ms a token, {statistics.median(ratios):.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
