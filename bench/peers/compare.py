"""Commands that measure, taking turns: A B C A B C …, each with nothing else running. Prints every pass, then ratios.

    python bench/peers/compare.py --rounds 3 \\
      "ours=tureen bench --workload single --start 'tureen serve'" \\
      "openvino=python bench/peers/openvino_pipeline.py MODEL --workload single"

Each command gets `--json FILE` at its end, as `tureen bench` takes it, and starts and stops its own server.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from tureen.bench.report import ColdStart, Result, cold_starts, in_short, lay_out, ratios, table


def measure(name: str, command: str, number: int) -> dict[str, Any]:
    """What one command wrote, its passes under its name in this comparison."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        subprocess.run([*shlex.split(command), "--json", str(file)], check=True, stdout=subprocess.DEVNULL)
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for result in document["results"]:
        result |= {"target": name, "round": number}
    document["cold_starts"] = {f"{name} {number}": cold for cold in document["cold_starts"].values()}
    return document


def medians(results: list[Result]) -> str:
    """Tokens a second of each target, over the rounds."""
    passes_of: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        passes_of[result.workload, result.target].append(result)
    lines = [("median of", "", "rounds", "out tok/s", "all tok/s")]
    for (workload, target), passes in passes_of.items():
        rates = [[result.output_tok_s for result in passes], [result.total_tok_s for result in passes]]
        lines.append((workload, target, str(len(passes)), *(in_short(statistics.median(rate)) for rate in rates)))
    return lay_out(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    options = parser.parse_args()
    commands = dict(text.split("=", 1) for text in options.commands)
    documents = [
        measure(name, command, number) for number in range(options.rounds) for name, command in commands.items()
    ]
    results = msgspec.convert([result for document in documents for result in document["results"]], list[Result])
    results.sort(key=lambda result: result.workload)
    colds = {name: cold for document in documents for name, cold in document["cold_starts"].items()}
    print(table(results), medians(results), ratios(results, list(commands)), sep="\n\n")
    print("\n" + cold_starts(msgspec.convert(colds, dict[str, ColdStart])))
    if options.json:
        document = {"machine": documents[0]["machine"], "cold_starts": colds, "results": msgspec.to_builtins(results)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
