"""Pictures of a bench document: speed-up by size, time split by kernel, roofline.

`python -m fusedvit.bench.plots DOCUMENT FOLDER` draws them again from a file that `fusedvit bench --json` wrote.
"""

import json
import sys
from pathlib import Path
from typing import Any

Document = dict[str, Any]
COLOURS = ("#1f6f8b", "#e07a5f", "#3d405b", "#81b29a", "#f2cc8f", "#6d597a", "#b56576", "#355070", "#a3b18a", "#588157")


def draw(document: Document, folder: Path) -> list[Path]:
    """Writes the pictures that the document has data for, a set for each tower; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for tower, found in document["towers"].items():
        rows = found["workloads"]
        for name, picture in (("speedup", _speedup), ("split", _split), ("roofline", _roofline)):
            figure = picture(tower, rows, document["ceilings"])
            if figure is not None:
                path = folder / f"{name}-{tower.lower()}.png"
                figure.savefig(path, dpi=150, bbox_inches="tight")
                written.append(path)
    return written


def _axes(title: str, width: float = 9.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.0))
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _speedup(tower: str, rows: dict[str, Any], ceilings: dict[str, float]) -> Any:
    """Peer time over ours against patches, a line per peer."""
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in rows.values():
        for name, ratio in row.get("speedup", {}).items():
            if name in ("ours eager", "ours, graph alone"):
                continue
            if name.startswith("engine-like") and name != row["engine_like"]:
                continue
            label = "engine-like (best attention)" if name.startswith("engine-like") else name
            lines.setdefault(label, []).append((row["tokens"], ratio["median"], ratio["low"], ratio["high"]))
    if not lines:
        return None
    figure, axes = _axes(f"{tower}: how many times as fast as each peer")
    for colour, (label, points) in zip(COLOURS, sorted(lines.items()), strict=False):
        x, y, low, high = zip(*sorted(points), strict=True)
        errors = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
        axes.errorbar(x, y, errors, label=label, color=colour, marker="o", markersize=4, linewidth=1.2, capsize=2)
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    axes.set(xscale="log", xlabel="patches", ylabel="peer / ours")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _split(tower: str, rows: dict[str, Any], ceilings: dict[str, float]) -> Any:
    """Where each replay's time goes, in shares."""
    rows = {name: row["split_ms"] for name, row in rows.items() if row.get("split_ms")}
    if not rows:
        return None
    figure, axes = _axes(f"{tower}: a replay's time by operation (milliseconds on the bar's end)")
    names = list(dict.fromkeys(name for split in rows.values() for name in split))
    for place, split in enumerate(rows.values()):
        total, left = sum(split.values()), 0.0
        for i, name in enumerate(names):
            share = 100 * split.get(name, 0.0) / total
            label = name[:40] if place == 0 else None
            axes.barh(place, share, left=left, color=COLOURS[i % len(COLOURS)], label=label)
            left += share
        axes.text(101, place, f"{total:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of kernel time")
    axes.legend(frameon=False, fontsize=7, ncol=5, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


def _roofline(tower: str, rows: dict[str, Any], ceilings: dict[str, float]) -> Any:
    """Achieved rate of each operation against its FLOPs a byte."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows.values():
        for name, cost in row.get("costs", {}).items():
            ms = row.get("split_ms", {}).get(name)
            if ms:
                points.setdefault(name, []).append((cost["flops"] / cost["bytes"], cost["flops"] / ms / 1e9))
    if not points:
        return None
    figure, axes = _axes(f"{tower}: operations under the roofline")
    knee = ceilings["tflops"] / ceilings["tbs"]
    axes.plot([10, knee, 1e4], [10 * ceilings["tbs"], ceilings["tflops"], ceilings["tflops"]], color="#999999")
    for colour, (name, found) in zip(COLOURS, points.items(), strict=False):
        x, y = zip(*found, strict=True)
        axes.scatter(x, y, label=name, color=colour, s=22)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    axes.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    for drawn in draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])):
        print(drawn)
