"""The demo's findings as tables for a terminal."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from fusedvit.cli.demo import CallResult, Demo
from fusedvit.cli.environment import device_name
from fusedvit.cli.names import shorten, stem
from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS

WHAT_A_GPU_ADDS = (
    "No GPU here: the fused tower ran on its torch operators, at a small geometry, so the times above say nothing "
    "about a GPU. On an NVIDIA GPU this same command takes Qwen3-VL-8B's full tower in bf16 through the Triton "
    "kernels, and reports kernel launches, latency and peak memory of both towers."
)


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


def _parity_table(demo: Demo) -> Table:
    table = Table(
        title="Parity", caption=_rule(demo), box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left"
    )
    table.add_column("output", no_wrap=True)
    for name in ("fused", "original", "max ratio", "rms ratio", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for call in demo.calls:
        table.add_row(f"[bold]{escape(shorten(call.name, 25))}[/]")
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
        f"up to {FACTOR_MAX:g} (max) and {FACTOR_RMS:g} (rms) pass.\n"
        f"Over {spread.ratio_max.count} outputs: max p50 {spread.ratio_max.p50:.2f}, worst {spread.ratio_max.max:.2f}; "
        f"rms p50 {spread.ratio_rms.p50:.2f}, worst {spread.ratio_rms.max:.2f}."
    )


def _cost_table(demo: Demo) -> Table:
    table = Table(title="A call, original → fused", title_justify="left", box=box.SIMPLE_HEAD)
    if demo.fused_kernels:
        table.caption, table.caption_justify = _kernel_note(demo.fused_kernels), "left"
    for name in ("", "t, h, w"):
        table.add_column(name, no_wrap=True)
    for name in ("patches", "ms", "", *_count_columns(demo.fused_kernels is None)):
        table.add_column(name, justify="right", no_wrap=True)
    for call in demo.calls:
        before, after = call.latency_ms["original"].median, call.latency_ms["fused"].median
        grid = ", ".join(map(str, call.grid_thw[0])) if len(call.grid_thw) == 1 else f"{len(call.grid_thw)} items"
        times = f"{before:.2f} → {after:.2f}", f"{before / after:.2f}x"
        table.add_row(escape(stem(call.name, 16)), grid, str(call.patches), *times, *_counts(call))
    return table


def _count_columns(on_gpu: bool) -> tuple[str, ...]:
    return ("GPU kernels", "launches", "peak MiB") if on_gpu else ("operators",)


def _kernel_note(calls: dict[str, int]) -> str:
    each = ", ".join(f"{count} {name}" for name, count in calls.items() if count)
    return (
        "Operators are torch's, views and allocations left out; the fused tower's torch operations are not fused.\n"
        f"On a GPU it launches {sum(calls.values())} kernels of ours in their place: {each}."
    )


def _counts(call: CallResult) -> tuple[str, ...]:
    if call.operators:
        return (f"{call.operators['original']} → {call.operators['fused']}",)
    launches, peak = call.launches or {}, call.peak_mib or {}
    return (
        " → ".join(str(launches[side].kernels) for side in launches),
        " → ".join(str(launches[side].host) for side in launches),
        " → ".join(f"{peak[side]:.0f}" for side in peak),
    )


def _packing_table(demo: Demo) -> Table:
    table = Table(title="Packed into CUDA graphs", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "tokens of token budget, a graph each"):
        table.add_column(name)
    for name in ("items", "padding", "eager"):
        table.add_column(name, justify="right", no_wrap=True)
    for call in demo.packing:
        graphs = ", ".join(f"{batch.tokens} of {batch.budget}" for batch in call.batches)
        counts = str(call.items), f"{call.padding:.1%}", str(len(call.eager))
        table.add_row(escape(shorten(call.name, 25)), graphs, *counts)
    return table


def _bad_input_table(demo: Demo) -> Table:
    table = Table("given", "what came back", "", title="Bad inputs", box=box.SIMPLE_HEAD, title_justify="left")
    for bad in demo.bad_inputs:
        answer = f"{bad.error}: {bad.message}" if bad.error else bad.message
        table.add_row(escape(bad.what), escape(answer), _mark(bad.refused))
    return table


def _kernel_table(demo: Demo) -> Table:
    table = Table("check", "outcome", "", title="Kernels, without a GPU", title_justify="left", box=box.SIMPLE_HEAD)
    for check in demo.kernels:
        table.add_row(escape(check.what), escape(check.detail), _mark(check.passed))
    return table


def _verdict(demo: Demo) -> str:
    outputs = demo.spread.ratio_max.count
    counts = [
        f"{outputs - demo.spread.failures} of {outputs} outputs within the tolerance",
        f"{sum(bad.refused for bad in demo.bad_inputs)} of {len(demo.bad_inputs)} bad inputs refused",
    ]
    if demo.kernels:
        counts.append(f"{sum(check.passed for check in demo.kernels)} of {len(demo.kernels)} kernel checks")
    word = "[bold green]passed[/]" if demo.passed else "[bold red]failed[/]"
    return f"{word}: {', '.join(counts)}; {demo.seconds:.0f} s"


def _mark(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[red]FAILED[/]"


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")
