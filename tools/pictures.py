"""Draws the pictures of docs/images that derive from the code and from bench/results: speed, and the house."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple

from import_rules import read_modules, room_graph

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "amd-zen4"
PERFORMANCE = ROOT / "docs" / "performance.md"
DAY = "2026-11-22"
OURS, PEERS = "ours", {"llama": "llama.cpp", "openvino": "OpenVINO"}
SETTINGS = {
    "AVX-512": ("single-native-again", "prefill-native-again", "throughput-native-again"),
    "all held to AVX2": (
        "single-avx2",
        "prefill-avx2",
        "prefill-avx2-llama",
        "throughput-avx2",
        "throughput-avx2-llama",
    ),
}
"""Files of one day on one machine, by what the processor's instructions were held to."""
WORKLOADS = {
    "single": "one stream",
    "prefill-512": "prompt of 512",
    "prefill-2048": "prompt of 2,048",
    "throughput-16": "16 streams",
    "throughput-64": "64 streams",
}
LIMIT = re.compile(r"^\| (single|prefill 512) \| [^|]*?([\d,]+) tok/s \| ([\d,]+) tok/s", re.MULTILINE)
"""A row of docs/performance.md: the tokens a second that the machine allows, and those that were reached."""

PAPER, INK, SOFT, OWN, COLOURS = "#ffffff", "#111827", "#6b7280", "#1d4ed8", {"llama": "#0f766e", "openvino": "#b45309"}
FONT = "font-family='system-ui,sans-serif' font-size='13'"


class Ratio(NamedTuple):
    """How many times as fast tureen was as a peer, in the median round of one run."""

    setting: str
    workload: str
    peer: str
    times: float


def pictures() -> dict[str, str]:
    """Returns the pictures by their names in docs/images."""
    return {"speed.svg": speed(), "limits.svg": limits(), "house.svg": house(room_graph(read_modules()))}


def ratios() -> list[Ratio]:
    """Returns tureen's speed as a multiple of its peers', both taken in the same round of the same run."""
    ratios = []
    for setting, names in SETTINGS.items():
        for workload in WORKLOADS:
            for peer in PEERS:
                pairs = [pair for name in names for pair in _rounds(name, workload, peer)]
                if pairs:
                    ratios.append(Ratio(setting, workload, peer, median(ours / theirs for ours, theirs in pairs)))
    return ratios


def _rounds(name: str, workload: str, peer: str) -> list[tuple[float, float]]:
    """Returns our speed and a peer's in each round of a file that has both."""
    speeds: dict[tuple[str, int], float] = {}
    for result in json.loads((RESULTS / f"{DAY}-{name}.json").read_text(encoding="utf-8"))["results"]:
        if result["workload"] == workload:
            speeds[result["target"], result["round"]] = result[
                "output_tok_s" if workload == "single" else "total_tok_s"
            ]
    return [
        (value, speeds[peer, number])
        for (target, number), value in speeds.items()
        if target == OURS and (peer, number) in speeds
    ]


def speed() -> str:
    """Draws the ratios as bars, with a line where both are equally fast."""
    rows, scale = ratios(), 150
    left, top, pitch = 260, 46, 24
    height, width = top + pitch * len(rows) + 30, left + int(scale * max(row.times for row in rows)) + 70
    parts, before = (
        [_text(12, 22, "tureen's tokens a second, as a multiple of a peer's in the same run", weight=600)],
        "",
    )
    for number, row in enumerate(rows):
        y = top + pitch * number
        label = f"{WORKLOADS[row.workload]}, {row.setting}"
        parts += [] if label == before else [_text(left - 10, y + 14, label, anchor="end")]
        before = label
        parts.append(_box(left, y, scale * row.times, pitch - 6, COLOURS[row.peer]))
        parts.append(_text(left + scale * row.times + 6, y + 14, f"{row.times:.2f} × {PEERS[row.peer]}"))
    parts.append(_line(left + scale, top - 8, left + scale, height - 26, INK, dash="4 3"))
    parts.append(_text(left + scale, height - 10, "equally fast", anchor="middle"))
    told = "; ".join(f"{WORKLOADS[r.workload]}, {r.setting}: {r.times:.2f} times {PEERS[r.peer]}" for r in rows)
    return _picture(width + 60, height, "How fast tureen is next to its peers", told, parts)


def limits() -> str:
    """Draws what is reached of what the machine allows."""
    parts, told = [_text(12, 22, "Tokens a second on two processors of Zen 4, and what they allow", weight=600)], []
    for number, (workload, *numbers) in enumerate(LIMIT.findall(PERFORMANCE.read_text(encoding="utf-8"))):
        most, reached = (int(figure.replace(",", "")) for figure in numbers)
        y = 46 + 44 * number
        parts += [
            _text(150, y + 16, workload, anchor="end"),
            _box(160, y, 400, 24, "none", stroke=SOFT),
            _box(160, y, 400 * reached / most, 24, OWN),
            _text(570, y + 16, f"{reached:,.0f} of {most:,} tok/s: {reached / most:.0%}"),
        ]
        told.append(f"{workload}: {reached:,.0f} of {most:,} tokens a second")
    return _picture(780, 140, "What is reached of what the machine allows", "; ".join(told), parts)


def house(graph: Mapping[str, Iterable[str]]) -> str:
    """Draws the packages: each imports only what stands below it. A line is left out where another way leads there."""
    below = {name: {other for other in others if other} - {name} for name, others in graph.items() if name}
    levels = dict.fromkeys(below, 0)
    for _ in below:  # as often as the longest way may be
        for name, others in below.items():
            for other in others:
                levels[other] = max(levels[other], levels[name] + 1)
    rows = [sorted(name for name in levels if levels[name] == level) for level in range(max(levels.values()) + 1)]
    width, step, places = 132 * max(map(len, rows)) + 40, 74, dict[str, tuple[float, float]]()
    for number, row in enumerate(rows):
        above = {name: [places[user][0] for user in places if name in below[user]] for name in row}
        row.sort(key=lambda name: sum(above[name]) / len(above[name]) if above[name] else 0)
        for index, name in enumerate(row):
            places[name] = (20 + (index + 0.5) * (width - 40) / len(row), 60 + step * number)
    parts = [_text(12, 22, "Who imports whom: lines lead down", weight=600)]
    for name, others in below.items():
        (x1, y1), reachable = places[name], [_reached(below, other) for other in others]
        for other in sorted(others):
            if not any(other in far for far in reachable):
                x2, y2 = places[other]
                parts.append(_line(x1, y1 + 13, x2, y2 - 13, SOFT))
    for name, (x, y) in places.items():
        parts += [_box(x - 60, y - 13, 120, 26, PAPER, stroke=INK), _text(x, y + 5, name, anchor="middle")]
    told = "; ".join(
        f"{name} imports {', '.join(sorted(others)) or 'nothing'}" for name, others in sorted(below.items())
    )
    return _picture(width, 60 + step * len(rows) - 30, "The packages of tureen", told, parts)


def _reached(below: Mapping[str, set[str]], start: str) -> set[str]:
    """Returns what can be reached from a package, without itself."""
    names: set[str] = set()
    left = list(below[start])
    while left:
        name = left.pop()
        if name not in names:
            names.add(name)
            left += below[name]
    return names


def _picture(width: float, height: float, title: str, told: str, parts: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' role='img' {FONT}>"
    words = f"<title>{escape(title)}</title><desc>{escape(told)}</desc>"
    return "\n".join([head, words, _box(0, 0, width, height, PAPER), *parts, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none") -> str:
    size = f"width='{width:.1f}' height='{height:.1f}' rx='3'"
    return f"<rect x='{x:.1f}' y='{y:.1f}' {size} fill='{fill}' stroke='{stroke}'/>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dash: str = "none") -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' stroke-dasharray='{dash}'/>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-weight='{weight}' fill='{INK}'"
    return f"<text {place}>{escape(text)}</text>"
