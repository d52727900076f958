"""A bench document as tables in a terminal."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusedvit.bench.bars import verdicts
from fusedvit.bench.roofline import Cost


def show(document: dict[str, Any], console: Console) -> None:
    """A table per tower: ours, in a row of calls and the first of one, its peers, and how far the floor is."""
    for tower, found in document["towers"].items():
        table = Table(title=f"{tower}, milliseconds (times as long as ours)", title_justify="left")
        names = _contenders(found["workloads"])
        for head in ("workload", "patches", "ours", "first", *names, "floor", "of floor", "MiB hf / ours"):
            table.add_column(head, justify="left" if head == "workload" else "right")
        for workload, row in found["workloads"].items():
            cells = [_cell(row, name) for name in names]
            floor = f"{row['floor_percent']:.0f} %" if "floor_percent" in row else "–"
            peaks = row.get("peak_mib")
            memory = f"{peaks['hf']:.0f} / {peaks['ours']:.0f}" if peaks else "–"
            ours = _cell(row, "ours")
            first = row.get("first_ms", {}).get("ours")
            begin = workload, str(row["tokens"]), ours, f"{first['median']:.2f}" if first else "–"
            table.add_row(*begin, *cells, f"{row['floor_ms']:.2f}", floor, memory)
        console.print(table)
        for workload, reason in found.get("failed", {}).items():
            console.print(f"[red]{workload}: {escape(reason)}[/]")
        for workload, row in found["workloads"].items():
            for name, reason in row["failed"].items():
                console.print(f"[yellow]{workload}: {name} does not run: {escape(reason)}[/]")
            for name, gate in row["parity"].items():
                if not gate["passed"]:
                    console.print(f"[red]{workload}: {name} is not right and gets no number: {gate['reason']}[/]")


def show_split(document: dict[str, Any], console: Console) -> None:
    """A table per workload that was split: each operation's share of a run, and how far the roofline is."""
    for tower, found in document["towers"].items():
        for workload, row in found["workloads"].items():
            if row.get("split_ms"):
                console.print(_split_table(f"{tower}, {workload}: one run by operation", row))


def _split_table(title: str, row: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in ("operation", "backend", "runs", "us each", "floor us", "of floor", "of the run"):
        table.add_column(head, justify="left" if head in ("operation", "backend") else "right")
    whole = sum(row["split_ms"].values())
    for name, ms in row["split_ms"].items():
        runs, floor = row["runs"][name], _floor_ms(row["costs"].get(name))
        least, share = (f"{1e3 * floor / runs:.1f}", f"{100 * floor / ms:.0f} %") if floor and ms else ("–", "–")
        backend = row["forms"].get(name, "–")
        table.add_row(
            name[:60], backend, str(runs), f"{1e3 * ms / runs:.1f}", least, share, f"{100 * ms / whole:.0f} %"
        )
    table.add_row("together", "", str(sum(row["runs"].values())), f"{1e3 * whole:.0f}", "", "", "")
    return table


def _floor_ms(cost: dict[str, float] | None) -> float | None:
    return None if cost is None else Cost(**cost).floor_ms


def show_bars(document: dict[str, Any], console: Console) -> None:
    """A line per bar."""
    table = Table(title="bars", title_justify="left")
    for head in ("workload", "what", "found", "bar", ""):
        table.add_column(head, justify="right" if head in ("found", "bar") else "left")
    for bar in verdicts(document):
        said = "met" if bar.met else "[yellow]missed[/]"
        table.add_row(bar.workload, bar.what, f"{bar.found:.2f}", f"{bar.wanted:.2f}", said)
    if table.row_count:
        console.print(table)


def _contenders(rows: dict[str, Any]) -> list[str]:
    """Every contender but ours itself, in the order they first come; the engine-like ones as one."""
    names: dict[str, None] = {}
    for row in rows.values():
        for name in row["clock"]:
            if name != "ours":
                names["engine-like" if name.startswith("engine-like") else name] = None
    return list(names)


def _cell(row: dict[str, Any], name: str) -> str:
    real = row["engine_like"] if name == "engine-like" else name
    if real not in row["ms"]:
        return "–" if real is None or row["parity"].get(real, {"passed": True})["passed"] else "[red]wrong[/]"
    text = f"{row['ms'][real]['median']:.2f}"
    if real in row.get("speedup", {}):
        text += f" ({row['speedup'][real]['median']:.2f})"
    return text


def show_kernels(rows: list[dict[str, Any]], console: Console) -> None:
    """A line per operation and shape: ours, the peers, and how far the floor is."""
    table = Table(title="operations alone, microseconds (peer / ours)", title_justify="left")
    for head in ("operation", "shape", "backend", "ours", "peers", "floor", "of floor"):
        table.add_column(head, justify="left" if head in ("operation", "shape", "backend", "peers") else "right")
    for row in rows:
        us = row["us"]
        peers = ", ".join(f"{n} {t:.1f}" + (f" ({t / us:.2f})" if us else "") for n, t in row["peers_us"].items())
        ours, share = (f"{us:.1f}", f"{100 * row['floor_us'] / us:.0f} %") if us else ("[red]wrong[/]", "–")
        table.add_row(row["op"], row["shape"], row["backend"], ours, peers, f"{row['floor_us']:.1f}", share)
    console.print(table)
