"""Asks trivial questions and counts the right answers: with a server's own defaults, or the sampling that is named.

python bench/first_answers.py http://127.0.0.1:30000 --samples 16
python bench/first_answers.py http://127.0.0.1:30000 --set temperature=1 --set top_p=1
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = {
    "What is the capital of France?": r"\bParis\b",
    "What is 2 + 2?": r"\b(4|four)\b",
    "What colour is the sky on a clear day?": r"\bblue\b",
    "How many days are in a week?": r"\b(7|seven)\b",
    "What is the opposite of hot?": r"\b(cold|cool)\b",
}
"""Questions, and what a right answer has in it, in any case."""

MAX_TOKENS = 48


def count(url: str, samples: int, sampling: dict[str, Any]) -> dict[str, int]:
    """Returns the number of right answers to each question."""
    right = {}
    for number, (question, pattern) in enumerate(QUESTIONS.items()):
        answers = [
            httpx.post(
                f"{url}/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": MAX_TOKENS,
                    "seed": 1000 * number + sample,
                    **sampling,
                },
                timeout=600,
            ).json()["choices"][0]["message"]["content"]
            for sample in range(samples)
        ]
        right[question] = sum(re.search(pattern, answer, re.IGNORECASE) is not None for answer in answers)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--samples", type=int, default=16, help="of each question")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="send this parameter")
    parser.add_argument("--json", type=Path, help="file that gets the counts appended, one object a line")
    args = parser.parse_args()
    sampling = {name: float(value) for name, _, value in (text.partition("=") for text in args.set)}
    right = count(args.url, args.samples, sampling)
    total = args.samples * len(right)
    for question, number in right.items():
        print(f"{number:3} of {args.samples}  {question}")
    print(f"{sum(right.values())} of {total}: {100 * sum(right.values()) / total:.0f} %")
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            facts = {"sampling": sampling or "defaults", "samples": args.samples, "right": right}
            file.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
