"""What a run is held to: how many times as fast ours has to be, and how slow a peer may be to count as one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOWER = "Qwen3-VL-8B"  # whose figures these are
ENGINE_LIKE = {  # wall time of ours against the graph of engine-like: (bar, where it is to go)
    "1 x 224 px": (1.35, 2.0),
    "1 x 448 px": (1.35, 2.0),
    "1 x 576 px": (1.35, 2.0),
    "video, 8 frames 224 px": (1.35, 2.0),
    "1 x 1024 px": (1.15, 1.5),
    "8 x 448 px": (1.15, 1.5),
    "mixed": (1.15, 1.5),
    "1 x 2048 px": (1.05, 1.3),
    "video, 64 frames 448 px": (1.05, 1.3),
}
EAGER, EAGER_PATCHES = 5.0, 1296  # against Hugging Face eager, up to so many patches
# Milliseconds of an engine-like encoder on an H200 in bf16 with FA3, as first measured. A peer of straw flatters.
KNOWN_ENGINE_LIKE_MS = dict(zip(ENGINE_LIKE, (2.16, 3.55, 4.26, 2.98, 14.1, 16.5, 20.2, 109.3, 62.1), strict=True))
SLACK = 1.05


@dataclass(frozen=True)
class Verdict:
    """One bar of one workload: `found` against `wanted`."""

    workload: str
    what: str
    found: float
    wanted: float
    met: bool


def verdicts(document: dict[str, Any]) -> Iterator[Verdict]:
    """Every bar that the document has figures for, of the tower and on the GPU that they are about."""
    if "H200" not in document.get("passport", {}).get("gpu", ""):
        return
    rows = document["towers"].get(TOWER, {}).get("workloads", {})
    for name, row in rows.items():
        ratios = {peer: ratio["median"] for peer, ratio in row.get("speedup", {}).items()}
        best = row.get("engine_like")
        if name in ENGINE_LIKE and best in ratios:
            bar, goal = ENGINE_LIKE[name]
            for what, wanted in (("engine-like / ours", bar), ("engine-like / ours, goal", goal)):
                yield Verdict(name, what, ratios[best], wanted, ratios[best] >= wanted)
            ms, most = row["ms"][best]["median"], SLACK * KNOWN_ENGINE_LIKE_MS[name]
            yield Verdict(name, "engine-like ms, at most", ms, most, ms <= most)
        if "hf" in ratios and row["tokens"] <= EAGER_PATCHES:
            yield Verdict(name, "Hugging Face eager / ours", ratios["hf"], EAGER, ratios["hf"] >= EAGER)
