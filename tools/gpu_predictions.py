"""Predict the speed of the engine on a GPU from bytes, operations and launches: python tools/gpu_predictions.py.

The shapes are those of Llama-3.1-8B in bfloat16. What a step must read and multiply is counted. How near a device comes
to its limits is assumed (`SHARE_OF_…`, `LAUNCH_S`), as are the host's milliseconds. `tools/gpu_check.py` prints these
predictions beside its figures.
"""

from __future__ import annotations

from typing import NamedTuple

LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 14336, 128256
QKV = 6144
WEIGHTS = LAYERS * (HIDDEN * QKV + HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN
"""Numbers of the matrices that each step reads; of the embedding it reads only rows."""
KV_BYTES = LAYERS * 2 * 8 * 128 * 2
"""Of a token."""
SHARE_OF_BANDWIDTH, SHARE_OF_PRODUCTS, SHARE_IN_ATTENTION = 0.80, 0.65, 0.35
"""What torch's products and the attention reach of a card's data sheet: assumed."""
LAUNCH_S = 2.5e-6
"""Of an operation in a captured step that is no product: assumed."""
KEYS = 512
"""Least number of keys for which plain torch operations read pages; see runner/cuda_graphs.py."""


class Card(NamedTuple):
    """A card's data sheet."""

    bytes_s: float
    operations_s: float  # products of bfloat16


class Path(NamedTuple):
    """A way to compute a step."""

    launches: int  # counted: operations that start a kernel, in 32 layers
    kv_passes: int  # times that keys and values are read or written


class Prediction(NamedTuple):
    """A step, or a prompt."""

    bytes: float
    operations: float
    launches: int
    seconds: float


CARDS = {"H100": Card(3.35e12, 989e12), "H200": Card(4.8e12, 989e12)}
PATHS = {"captured": Path(1397, 3), "captured, Triton kernels": Path(376, 1)}
NUM_PRODUCTS = 4 * LAYERS + 1
BEST = "captured, Triton kernels"
RUNS = ((1, 128, 128), (16, 128, 128), (64, 128, 128), (256, 128, 512))
"""Rows, and the tokens of each one's prompt and output."""


def decode(card: Card, path: Path, rows: int, context: int) -> Prediction:
    """Predict a decode step of `rows` sequences with `context` tokens each."""
    keys = context if path.kv_passes == 1 else max(KEYS, 1 << (context - 1).bit_length())
    kv_bytes = rows * keys * KV_BYTES * path.kv_passes
    operations = 2 * WEIGHTS * rows
    products_s = max(
        2 * WEIGHTS / (card.bytes_s * SHARE_OF_BANDWIDTH), operations / (card.operations_s * SHARE_OF_PRODUCTS)
    )
    device_s = products_s + kv_bytes / (card.bytes_s * SHARE_OF_BANDWIDTH)
    launches_s = (path.launches - NUM_PRODUCTS) * LAUNCH_S
    seconds = device_s + launches_s + host_s(rows)
    return Prediction(2 * WEIGHTS + kv_bytes, operations, path.launches, seconds)


def prompt(card: Card, tokens: int) -> Prediction:
    """Predict a prompt that is computed alone, with Triton kernels, not captured."""
    operations = 2 * (WEIGHTS - VOCABULARY * HIDDEN) * tokens
    scores = 2 * LAYERS * tokens * tokens * HIDDEN  # half of them are seen; two products each
    seconds = operations / (card.operations_s * SHARE_OF_PRODUCTS) + scores / (card.operations_s * SHARE_IN_ATTENTION)
    hidden_bytes = LAYERS * tokens * 2 * (6 * HIDDEN + 2 * QKV + 3 * INNER)
    seconds += hidden_bytes / (card.bytes_s * SHARE_OF_BANDWIDTH)
    return Prediction(2 * WEIGHTS + hidden_bytes, operations + scores, PATHS[BEST].launches, seconds)


def output_rate(card: Card, path: Path, rows: int, num_prompt: int, num_output: int) -> float:
    """Predict the output tokens a second of a run that begins with all prompts. Context is that of its middle."""
    step = decode(card, path, rows, num_prompt + num_output // 2)
    return rows * num_output / (num_output * step.seconds + rows * num_prompt / (4096 / prompt(card, 4096).seconds))


def host_s(rows: int) -> float:
    """Return the engine's time between two steps: 0.1 ms at 1 row and 2 ms at 256, measured on a busy CPU."""
    return 1e-4 + 7.5e-6 * rows


def main() -> None:
    print("| card | rows | prompt / output | way | GB | GFLOP | launches | ms a step | output tok/s |")
    print("|---" * 9 + "|")
    for name, card in CARDS.items():
        for rows, num_prompt, num_output in RUNS:
            for way, path in PATHS.items():
                step = decode(card, path, rows, num_prompt + num_output // 2)
                rate = output_rate(card, path, rows, num_prompt, num_output)
                counts = f"{step.bytes / 1e9:.1f} | {step.operations / 1e9:,.0f} | {step.launches:,}"
                print(f"| {name} | {rows} | {num_prompt} / {num_output} | {way} | {counts}", end="")
                print(f" | {step.seconds * 1e3:.1f} | {rate:,.0f} |")
        whole = prompt(card, 4096)
        rate = 4096 / whole.seconds
        print(
            f"{name}: a prompt of 4,096 tokens: {whole.operations / 1e12:.0f} TFLOP, {whole.bytes / 1e9:.0f} GB,",
            end="",
        )
        print(f" {whole.seconds * 1e3:.0f} ms, {rate:,.0f} tok/s")


if __name__ == "__main__":
    main()
