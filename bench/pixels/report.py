"""`fusedvit bench pixels`: its document, the document's tables, and a picture of the time of each stage."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from fusedvit.bench.pixels import corpus, table
from fusedvit.bench.pixels.table import HF_CPU, HF_CPU_HF, HF_CUDA, OURS, Step, Workload
from fusedvit.bench.tables import Table, pixel_table, rate_table

CONTENDERS = (HF_CPU_HF, HF_CPU, HF_CUDA, OURS)


@dataclass(frozen=True)
class Options:
    """tower: a geometry's name; images: size of the corpus; seconds: of timing for each workload and contender."""

    tower: str
    workloads: Mapping[str, Workload]
    images: int = 2000
    seconds: float = 4.0


def measure(
    options: Options, device: torch.device, step: Step, keep: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """The document; `keep` is called with the document so far after every part."""
    found: dict[str, Any] = {"tower": options.tower, "rows": []}
    step("building the tower")
    setting = table.setting_of(options.tower, device)
    for name, work in options.workloads.items():
        step(name)
        found["rows"].append(table.measure(setting, name, work, options.seconds))
        keep(found)
    first = next(iter(options.workloads.values()))
    step("JPEGs by threads")
    found["threads"] = corpus.by_threads(setting, first, min(options.images, 256))
    keep(found)
    step("bytes against the backends'")
    found["differences"] = corpus.differences(setting, first)
    keep(found)
    step(f"{options.images} JPEGs to tokens")
    found["corpus"] = corpus.measure(setting, first, options.images, options.seconds)
    keep(found)
    return found


def passed(found: Mapping[str, Any]) -> bool:
    """Whether all tokens pass, and every bar that was measured on a GPU is met."""
    return all(verdict["passed"] for row in found["rows"] for verdict in row["tokens"].values()) and not missed(found)


def missed(found: Mapping[str, Any]) -> list[str]:
    """Workloads whose bar is not met; bars are for an H100 and an 8B tower."""
    if found["tower"] != "Qwen3-VL-8B":
        return []
    rows = [row for row in found["rows"] if row["bar_ms"] and OURS in row["ms"]]
    return [row["workload"] for row in rows if row["ms"][OURS]["median"] > row["bar_ms"]]


def show(found: Mapping[str, Any], console: Console) -> None:
    pixel_table(found["rows"]).show(f"{found['tower']}: ms from decoded images to tokens", console)
    rate_table(found["corpus"]).show("images a second, JPEG to tokens", console)
    rows = [[str(row["threads"]), f"{row['decoded']:.0f}", f"{row['patches']:.0f}"] for row in found["threads"]]
    Table(["threads", "decoded", "to patches"], rows).show("images a second by decoding threads", console)
    if found["corpus"].get("gpu_busy"):
        console.print(f"GPU in kernels while the corpus runs: {100 * found['corpus']['gpu_busy']['share']:.0f} %")
    for name, difference in found["differences"].items():
        console.print(
            f"bytes against {name}: {100 * difference['share']:.2f} % differ, by {difference['largest']:g} at most"
        )
    for workload in missed(found):
        console.print(f"[red]bar missed: {workload}[/]")


def draw(found: Mapping[str, Any], suffix: str) -> bytes:
    """A picture with a bar of stages for each contender and workload, as a file of this suffix, such as ".png"."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = found["rows"]
    figure, panels = pyplot.subplots(len(rows), 1, figsize=(8, 1.6 * len(rows) + 0.6), squeeze=False)
    for panel, row in zip(panels[:, 0], rows, strict=True):
        names = [c for c in CONTENDERS if c in row["ms"]][::-1]
        left = [0.0] * len(names)
        for stage, colour in (("pixels", "tab:orange"), ("tower", "tab:blue")):
            widths = [row["stages_ms"][f"{c}: {stage}"] for c in names]
            panel.barh(names, widths, left=left, color=colour, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.plot([row["ms"][c]["median"] for c in names], names, "k|", markersize=14, label="measured together")
        panel.set_title(row["workload"], loc="left", fontsize=9)
        panel.tick_params(labelsize=8)
    panels[0, 0].legend(fontsize=8)
    panels[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix.lower()[1:])
    pyplot.close(figure)
    return drawn.getvalue()
