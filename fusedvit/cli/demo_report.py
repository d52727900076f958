"""The demo's results: as records, as tables for a terminal, and as one picture."""

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from fusedvit.bench.timing import Launches, Spread
from fusedvit.cli.console import new_table, shorten, stem
from fusedvit.cli.env import device_name
from fusedvit.cli.kernel_checks import FAILED, NOT_RUN, OK, KernelCheck
from fusedvit.cli.parity import OutputParity
from fusedvit.pixels.media import Media
from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS, Summary

SIDES = ("original", "fused")
GREY, BLUE, RED, INK = "#b9bec6", "#2463c9", "#c8372d", "#22262d"
MAX_TILES = 6  # pictures in the upper row
MARKS = {OK: "[green]ok[/]", FAILED: "[red]FAILED[/]", NOT_RUN: "[yellow]not run[/]"}
BELOW_1 = "Below 1 the fused tower is closer to the {} reference than the original is."
NO_TIMES = "No GPU: times are not compared."
WHAT_A_GPU_ADDS = (
    "No GPU here: the fused tower ran on its torch operators, at a small geometry, and times are not compared. "
    "On an NVIDIA GPU this same command takes Qwen3-VL-8B's full tower in bf16 through the Triton "
    "kernels, and reports kernel launches, latency and peak memory of both towers."
)


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CallResult:
    """One call of both towers. On a GPU it has the costs per side ("original", "fused"). Times and memory of a CPU say
    nothing about a GPU: there it only has the number of the original's operators. These are counted in a dispatch mode,
    in which no tower runs fused."""

    name: str
    grid_thw: list[list[int]]
    patches: int
    tokens: int
    parity: list[OutputParity]
    latency_ms: dict[str, Spread] | None
    launches: dict[str, Launches] | None
    operators: int | None
    peak_mib: dict[str, float] | None


@dataclass(frozen=True)
class BadInput:
    """An input that must be refused, and the error that it raised ("" if it was accepted)."""

    what: str
    error: str
    message: str

    @property
    def refused(self) -> bool:
        return self.error in ("ValueError", "TypeError")


@dataclass(frozen=True)
class PackedBatch:
    """One replay: `tokens` merged tokens of `pieces` images, videos or parts of videos, in the graph of `budget`."""

    budget: int
    tokens: int
    pieces: int


@dataclass(frozen=True)
class PackedCall:
    """The batches of one call, and the reason for each item that runs eagerly because no graph holds it."""

    name: str
    items: int
    batches: list[PackedBatch]
    eager: list[str]

    @property
    def padding(self) -> float:
        """Share of the replayed budgets that no token fills."""
        room = sum(batch.budget for batch in self.batches)
        return 1 - sum(batch.tokens for batch in self.batches) / room if room else 0.0


@dataclass(frozen=True)
class Demo:
    """All results of the demo."""

    environment: dict[str, Any]
    tower: str
    geometry: dict[str, Any]
    dtype: str
    reference_dtype: str
    calls: list[CallResult]
    spread: Summary
    bad_inputs: list[BadInput]
    report: str
    stats: dict[str, Any]
    fused_kernels: dict[str, int] | None  # launches of a fused call on a GPU, by operation; None there
    kernels: list[KernelCheck]
    packing: list[PackedCall]  # of each call's grids, and of MANY times the last one's in one call
    seconds: float

    @property
    def same_answers(self) -> bool:
        return self.spread.failures == 0

    @property
    def compared(self) -> bool:
        """Whether any call ran fused; otherwise the original was compared with itself."""
        return self.stats["fused"] > 0

    @property
    def passed(self) -> bool:
        refused = all(bad.refused for bad in self.bad_inputs)
        return self.same_answers and self.compared and refused and all(check.passed for check in self.kernels)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def show(demo: Demo, console: Console) -> None:
    """Print everything, the verdict last."""
    geometry = ", ".join(f"{key} {value}" for key, value in demo.geometry.items())
    console.print(f"\n[bold]{escape(demo.tower)}[/] on {device_name(demo.environment)}, {_short(demo.dtype)}")
    console.print(f"[dim]{escape(geometry)}[/]\n")
    console.print(_parity_table(demo))
    console.print(_cost_table(demo))
    console.print(_packing_table(demo))
    console.print(Panel(escape(demo.report), title="the fused tower says", title_align="left", border_style="dim"))
    console.print(_bad_input_table(demo))
    if demo.kernels:
        console.print(_kernel_table(demo))
    if not demo.environment["gpus"]:
        console.print(WHAT_A_GPU_ADDS)
    console.print(f"\n{_verdict(demo)}")


_table = functools.partial(new_table, box=box.SIMPLE_HEAD)


def _add_numbers(table: Table, *heads: str) -> None:
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)


def _parity_table(demo: Demo) -> Table:
    table = _table("Parity", "output", caption=_rule(demo), caption_justify="left")
    _add_numbers(table, "fused", "original", "max ratio", "rms ratio", "")
    for call in demo.calls:
        table.add_row(f"[bold]{escape(call.name)}[/]")
        for parity in call.parity:
            c = parity.comparison
            errors = f"{c.max_ours:.2e}", f"{c.max_pt:.2e}", f"{c.ratio_max:.2f}", f"{c.ratio_rms:.2f}"
            table.add_row(f"  {escape(parity.output)}", *errors, _mark(c.passed))
            if c.reason:
                table.add_row(f"    [red]{escape(c.reason)}[/]")
    return table


def _rule(demo: Demo) -> str:
    spread = demo.spread
    return (
        f"Largest errors against the original in {_short(demo.reference_dtype)}. Ratios are fused / original: "
        f"up to {FACTOR_MAX:g} (max) and {FACTOR_RMS:g} (rms) pass. "
        f"{BELOW_1.format(_short(demo.reference_dtype))}\n"
        f"Over {spread.ratio_max.count} outputs: max p50 {spread.ratio_max.p50:.2f}, worst {spread.ratio_max.max:.2f}; "
        f"rms p50 {spread.ratio_rms.p50:.2f}, worst {spread.ratio_rms.max:.2f}."
    )


def _cost_table(demo: Demo) -> Table:
    note = _kernel_note(demo.fused_kernels) if demo.fused_kernels else None
    table = _table("A call, original → fused", "", caption=note, caption_justify="left")
    table.add_column("t, h, w", no_wrap=True)
    on_gpu = demo.fused_kernels is None
    costs = ("ms", "", "GPU kernels", "launches", "peak MiB") if on_gpu else ("operators → kernels",)
    _add_numbers(table, "patches", *costs)
    for call in demo.calls:
        grid = ", ".join(map(str, call.grid_thw[0])) if len(call.grid_thw) == 1 else f"{len(call.grid_thw)} items"
        table.add_row(escape(call.name), grid, str(call.patches), *_times(call), *_counts(call, demo))
    return table


def _kernel_note(calls: dict[str, int]) -> str:
    each = ", ".join(f"{count} {name}" for name, count in calls.items() if count)
    return (
        "Operators are the original's of torch, views and allocations left out. On a GPU the fused tower launches\n"
        f"kernels in their place: {each}."
    )


def _times(call: CallResult) -> tuple[str, ...]:
    if call.latency_ms is None:
        return ()
    before, after = (call.latency_ms[side].median for side in SIDES)
    return f"{before:.2f} → {after:.2f}", f"{before / after:.2f}x"


def _counts(call: CallResult, demo: Demo) -> tuple[str, ...]:
    if demo.fused_kernels:
        return (f"{call.operators} → {sum(demo.fused_kernels.values())}",)
    launches, peak = call.launches or {}, call.peak_mib or {}
    return (
        " → ".join(str(launches[side].kernels) for side in launches),
        " → ".join(str(launches[side].host) for side in launches),
        " → ".join(f"{peak[side]:.0f}" for side in peak),
    )


def _packing_table(demo: Demo) -> Table:
    table = _table("Packed into CUDA graphs", "", "tokens of token budget, a graph each")
    _add_numbers(table, "items", "padding", "eager")
    for call in demo.packing:
        graphs = ", ".join(f"{batch.tokens} of {batch.budget}" for batch in call.batches)
        counts = str(call.items), f"{call.padding:.1%}", str(len(call.eager))
        table.add_row(escape(call.name), graphs, *counts)
    return table


def _bad_input_table(demo: Demo) -> Table:
    table = _table("Bad inputs", "given", "what came back", "")
    for bad in demo.bad_inputs:
        answer = f"{bad.error}: {bad.message}" if bad.error else bad.message
        table.add_row(escape(bad.what), escape(answer), _mark(bad.refused))
    return table


def _kernel_table(demo: Demo) -> Table:
    table = _table("Kernels, without a GPU", "check", "outcome", "")
    for check in demo.kernels:
        table.add_row(escape(check.what), escape(check.detail), MARKS[check.outcome])
    return table


def _verdict(demo: Demo) -> str:
    outputs = demo.spread.ratio_max.count
    counts = [
        f"{outputs - demo.spread.failures} of {outputs} outputs within the tolerance",
        f"{sum(bad.refused for bad in demo.bad_inputs)} of {len(demo.bad_inputs)} bad inputs refused",
    ]
    for outcome, said in ((OK, "kernel checks passed"), (FAILED, "FAILED"), (NOT_RUN, "not run, for want of time")):
        number = sum(check.outcome == outcome for check in demo.kernels)
        counts += [f"{number} {said}"] if number else []
    original = sum(demo.stats["original"].values())
    counts += [f"{original} calls of the fused tower ran the original code"] if original else []
    counts += [] if demo.compared else ["nothing was compared"]
    word = "[bold green]passed[/]" if demo.passed else "[bold red]failed[/]"
    return f"{word}: {', '.join(counts)}; {demo.seconds:.0f} s"


def _mark(passed: bool) -> str:
    return MARKS[OK if passed else FAILED]


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


# ── picture ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def draw(demo: Demo, media: Sequence[Media], suffix: str) -> bytes:
    """The picture as a file of this suffix, such as ".png"."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    tiles = _tiles(demo, media)
    # the pictures share the figure's width, which determines the height of their row
    heights = [min(11 / sum(tile.aspect for tile in tiles), 4.0), 2.7]
    total = sum(heights) + 2.4
    with plt.rc_context(style):
        figure = plt.figure(figsize=(12, total), dpi=130, facecolor="white")
        rows = figure.add_gridspec(
            2, 1, height_ratios=heights, left=0.045, right=0.975, top=1 - 1.2 / total, bottom=0.6 / total, hspace=0.26
        )
        _title(figure, demo, total)
        _draw_tiles(figure, rows[0], tiles)
        # a CPU's times say nothing about a GPU, and are not drawn
        panels = [lambda axes: _draw_latency(axes, demo.calls)] if demo.environment["gpus"] else []
        panels += [lambda axes: _draw_ratios(axes, demo), lambda axes: _draw_counts(axes, demo)]
        cells = rows[1].subgridspec(1, len(panels), wspace=0.22)
        for i, panel in enumerate(panels):
            panel(figure.add_subplot(cells[i]))
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix.lower()[1:])
        plt.close(figure)
    return drawn.getvalue()


def _title(figure: Any, demo: Demo, height: float) -> None:
    verdict, colour = ("same answers", BLUE) if demo.same_answers else ("DIFFERENT ANSWERS", RED)
    inside = demo.spread.ratio_max.count - demo.spread.failures
    machine = f"{demo.tower}, {_short(demo.dtype)}, {device_name(demo.environment)}"
    counts = f"{inside} of {demo.spread.ratio_max.count} outputs within the tolerance"
    head, line = 1 - 0.42 / height, 1 - 0.66 / height
    figure.text(0.045, head, "fusedvit: the original tower and the fused one", fontsize=16, weight="bold")
    figure.text(0.045, line, machine if demo.environment["gpus"] else f"{machine}. {NO_TIMES}")
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
    """Up to MAX_TILES pictures; a video shows up to three of its frames if there is room."""
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
    sides = {side: [call.latency_ms[side].median for call in calls if call.latency_ms] for side in SIDES}
    _bars(axes, calls, sides)
    axes.set_title("latency of a call here, ms", loc="left", weight="bold")
    axes.legend(frameon=False, loc="upper left")


def _draw_counts(axes: Any, demo: Demo) -> None:
    """Profiled kernels; on a CPU the original's operators and the kernels that the fused tower launches on a GPU."""
    if demo.fused_kernels:
        before: list[Any] = [call.operators for call in demo.calls]
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


def _draw_ratios(axes: Any, demo: Demo) -> None:
    calls = demo.calls
    limits = {"ratio_max": (FACTOR_MAX, BLUE, "max error"), "ratio_rms": (FACTOR_RMS, INK, "rms error")}
    for offset, (field, (limit, colour, label)) in zip((-0.15, 0.15), limits.items(), strict=True):
        ratios = [[getattr(p.comparison, field) for p in call.parity] for call in calls]
        at = [i + offset + 0.04 * (j - len(r) / 2) for i, r in enumerate(ratios) for j in range(len(r))]
        axes.scatter(at, [v for r in ratios for v in r], s=22, color=colour, alpha=0.8, label=label, zorder=3)
        axes.axhline(limit, color=colour, linewidth=1, linestyle="--")
        axes.text(len(calls) - 0.5, limit, f"limit, {label} ", ha="right", va="bottom", fontsize=8, color=colour)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(range(len(calls)), labels=_labels(calls), fontsize=_size(calls))
    axes.set_xlim(-0.5, len(calls) - 0.5)
    axes.set_ylim(0, max(FACTOR_MAX * 1.15, axes.get_ylim()[1]))
    axes.set_title("error, fused / original", loc="left", weight="bold")
    axes.legend(frameon=False, loc="lower left", ncols=2)
    axes.set_xlabel(BELOW_1.format(_short(demo.reference_dtype)), loc="left", fontsize=8)


def _labels(calls: Sequence[CallResult]) -> list[str]:
    return [stem(call.name, max(6, 52 // len(calls))) for call in calls]


def _size(calls: Sequence[CallResult]) -> int:
    return 9 if len(calls) <= 3 else 7
