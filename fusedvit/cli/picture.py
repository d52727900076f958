"""The demo as one picture: what went in above, what came of it below."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusedvit.cli.demo import CallResult, Demo
from fusedvit.cli.environment import device_name
from fusedvit.cli.media import Media
from fusedvit.cli.names import shorten, stem
from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS

GREY, BLUE, RED, INK = "#b9bec6", "#2463c9", "#c8372d", "#22262d"
MAX_TILES = 6  # pictures in the upper row


@dataclass(frozen=True)
class _Tile:
    """One picture. frame: uint8 [H, W, 3], cut into grid_h x grid_w patches."""

    frame: np.ndarray
    grid_h: int
    grid_w: int
    label: str

    @property
    def aspect(self) -> float:
        height, width = self.frame.shape[:2]
        return min(max(width / height, 0.3), 4.0)


def draw(demo: Demo, media: Sequence[Media], path: Path) -> None:
    """Write a PNG (or what `path`'s suffix says) to `path`, making its folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    tiles = _tiles(demo, media)
    # the row of pictures is as high as it comes out when they share the width
    heights = [min(11 / sum(tile.aspect for tile in tiles), 4.0), 2.7]
    total = sum(heights) + 2.2
    with plt.rc_context(style):
        figure = plt.figure(figsize=(12, total), dpi=130, facecolor="white")
        rows = figure.add_gridspec(
            2, 1, height_ratios=heights, left=0.045, right=0.975, top=1 - 1.2 / total, bottom=0.4 / total, hspace=0.26
        )
        _title(figure, demo, total)
        _draw_tiles(figure, rows[0], tiles)
        panels = rows[1].subgridspec(1, 3, wspace=0.22)
        _draw_latency(figure.add_subplot(panels[0]), demo.calls)
        _draw_ratios(figure.add_subplot(panels[1]), demo.calls)
        _draw_counts(figure.add_subplot(panels[2]), demo)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _title(figure: Any, demo: Demo, height: float) -> None:
    verdict, colour = ("same answers", BLUE) if demo.same_answers else ("DIFFERENT ANSWERS", RED)
    inside = demo.spread.ratio_max.count - demo.spread.failures
    machine = f"{demo.tower}, {demo.dtype.removeprefix('torch.')}, {device_name(demo.environment)}"
    counts = f"{inside} of {demo.spread.ratio_max.count} outputs within the tolerance"
    head, line = 1 - 0.42 / height, 1 - 0.66 / height
    figure.text(0.045, head, "fusedvit: the original tower and the fused one", fontsize=16, weight="bold")
    figure.text(0.045, line, machine)
    figure.text(0.975, head, verdict, fontsize=16, weight="bold", ha="right", color=colour)
    figure.text(0.975, line, counts, ha="right")


def _draw_tiles(figure: Any, row: Any, tiles: Sequence[_Tile]) -> None:
    cells = row.subgridspec(1, len(tiles), width_ratios=[tile.aspect for tile in tiles], wspace=0.03)
    for cell, tile in zip(cells, tiles, strict=True):
        axes = figure.add_subplot(cell)
        extent = (0, tile.grid_w, tile.grid_h, 0)
        axes.imshow(tile.frame, extent=extent, aspect=tile.grid_w / tile.grid_h / tile.aspect)
        # a cell of the drawn grid is a token of the language model: 2 x 2 patches
        axes.set_xticks(range(0, tile.grid_w + 1, 2), labels=[])
        axes.set_yticks(range(0, tile.grid_h + 1, 2), labels=[])
        axes.grid(color="white", alpha=0.35, linewidth=0.5)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        room = max(6, int(165 * tile.aspect / sum(t.aspect for t in tiles)))  # characters
        label = "\n".join(shorten(line, room) for line in tile.label.split("\n"))
        axes.set_title(label, fontsize=8.5, loc="left")


def _tiles(demo: Demo, media: Sequence[Media]) -> list[_Tile]:
    """Up to MAX_TILES pictures; a video shows several of its frames, as many as there is room for."""
    shown = media[:MAX_TILES]
    calls = {call.name: call for call in demo.calls}
    room = MAX_TILES - len(shown)
    tiles = []
    for item in shown:
        count = min(1 + room, 3, len(item.frames))
        room -= count - 1
        _, height, width = calls[item.name].grid_thw[0]
        for i, pick in enumerate(np.linspace(0, len(item.frames) - 1, count).round().astype(int)):
            what = f"frame {pick + 1} of {len(item.frames)}" if item.kind == "video" else ""
            if i == 0:
                tokens = f"{calls[item.name].tokens} tokens"
                what = f"{item.name}\n{tokens}{', ' if what else ''}{what}"
            tiles.append(_Tile(item.frames[pick], height, width, what))
    return tiles


def _draw_latency(axes: Any, calls: Sequence[CallResult]) -> None:
    sides = {side: [call.latency_ms[side].median for call in calls] for side in ("original", "fused")}
    _bars(axes, calls, sides)
    axes.set_title("latency of a call here, ms", loc="left", weight="bold")
    axes.legend(frameon=False, loc="upper left")


def _draw_counts(axes: Any, demo: Demo) -> None:
    """Kernels as profiled; on a CPU the original's operators beside what the fused tower would launch on a GPU."""
    if demo.fused_kernels:
        before = [(call.operators or {})["original"] for call in demo.calls]
        after = [sum(demo.fused_kernels.values())] * len(demo.calls)
        sides = {"original, torch operators": before, "fused, kernels on a GPU": after}
        axes.set_title("operations of a call", loc="left", weight="bold")
    else:
        sides = {s: [(call.launches or {})[s].kernels for call in demo.calls] for s in ("original", "fused")}
        axes.set_title("GPU kernels of a call", loc="left", weight="bold")
    _bars(axes, demo.calls, sides)
    axes.legend(frameon=False, loc="upper left")


def _bars(axes: Any, calls: Sequence[CallResult], sides: dict[str, list[Any]]) -> None:
    positions = np.arange(len(calls))
    for offset, colour, (side, values) in zip((-0.2, 0.2), (GREY, BLUE), sides.items(), strict=True):
        bars = axes.bar(positions + offset, values, 0.38, color=colour, label=side)
        texts = [f"{v:.1f}" if v < 100 and v % 1 else f"{v:.0f}" for v in values]
        axes.bar_label(bars, labels=texts, padding=2, fontsize=_size(calls) - 1)
    axes.set_xticks(positions, labels=_labels(calls), fontsize=_size(calls))
    axes.margins(y=0.34)  # room for the legend


def _draw_ratios(axes: Any, calls: Sequence[CallResult]) -> None:
    limits = {"ratio_max": (FACTOR_MAX, BLUE, "max error"), "ratio_rms": (FACTOR_RMS, INK, "rms error")}
    for offset, (field, (limit, colour, label)) in zip((-0.15, 0.15), limits.items(), strict=True):
        ratios = [[getattr(p.comparison, field) for p in call.parity] for call in calls]
        places = [i + offset + 0.04 * (j - len(r) / 2) for i, r in enumerate(ratios) for j in range(len(r))]
        axes.scatter(places, [v for r in ratios for v in r], s=22, color=colour, alpha=0.8, label=label, zorder=3)
        axes.axhline(limit, color=colour, linewidth=1, linestyle="--")
        axes.text(len(calls) - 0.5, limit, f"limit, {label} ", ha="right", va="bottom", fontsize=8, color=colour)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(range(len(calls)), labels=_labels(calls), fontsize=_size(calls))
    axes.set_xlim(-0.5, len(calls) - 0.5)
    axes.set_ylim(0, max(FACTOR_MAX * 1.15, axes.get_ylim()[1]))
    axes.set_title("error, fused / original", loc="left", weight="bold")
    axes.legend(frameon=False, loc="lower left", ncols=2)


def _labels(calls: Sequence[CallResult]) -> list[str]:
    return [stem(call.name, max(6, 52 // len(calls))) for call in calls]


def _size(calls: Sequence[CallResult]) -> int:
    return 9 if len(calls) <= 3 else 7
