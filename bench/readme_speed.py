"""The README's first table, whole towers against the peers, and the sweep's, from one document of `fusedvit bench`."""

from collections.abc import Iterable
from typing import Any

from fusedvit.bench import workloads

Table = tuple[list[str], list[list[str]]]


def speed_tables(document: dict[str, Any]) -> dict[str, Table]:
    """(head, rows) by tower: what is none of the sweep, in the document's order."""
    return _tables(document, swept=False)


def sweep_tables(document: dict[str, Any]) -> dict[str, Table]:
    """The same of the sweep."""
    return _tables(document, swept=True)


def _tables(document: dict[str, Any], swept: bool) -> dict[str, Table]:
    tables, sweep = {}, workloads.sweep()
    for tower, found in document["towers"].items():
        chosen = {"workloads": {name: row for name, row in found["workloads"].items() if (name in sweep) == swept}}
        if chosen["workloads"]:
            tables[tower] = _head(chosen), _rows(chosen)
    return tables


def explanation(document: dict[str, Any]) -> list[str]:
    """What stands in the tables."""
    ceilings = document["ceilings"]
    return [
        "Milliseconds, bf16, random weights at realistic scale; in brackets how many times as long as ours, median of",
        "the ratios of single rounds, all contenders in turns in one process. **Ours**: wall time from pixels and grid",
        "on the GPU to outputs that the caller owns. **Engine-like**: cuBLAS, the fastest varlen attention of FA3,",
        "cuDNN and torch for each workload, one fused rotary kernel, everything in a CUDA graph of the exact shape;",
        "the time of its replay alone, metadata and copies not counted. **Hugging Face**: `sdpa`, eager, wall time.",
        f"Floor: useful FLOPs at {ceilings['tflops']:.0f} TFLOP/s or weights at {ceilings['tbs']:.1f} TB/s.",
        "A contender whose answer breaks the tolerance rule gets no number.",
        *turns_explained(row for found in document["towers"].values() for row in found["workloads"].values()),
    ]


def turns_explained(rows: Iterable[dict[str, Any]]) -> list[str]:
    """How long turns are, of those rows that say so."""
    counts = sorted({row["calls_in_a_turn"] for row in rows if "calls_in_a_turn" in row})
    if not counts:
        return []
    calls = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [
        f"A turn is {calls} calls in a row, as many for every contender and the fewer the slower they are; its median",
        "counts. **First**: ours as the first call of a turn, when the CPU's caches have lost its code to the others';",
        "where there is none, a turn is one call.",
    ]


def _has_first(found: dict[str, Any]) -> bool:
    return any("first_ms" in row for row in found["workloads"].values())


def _compiled(found: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for row in found["workloads"].values():
        names |= dict.fromkeys(name for name in row["ms"] if name.startswith("hf compiled"))
    return list(names)


def _head(found: dict[str, Any]) -> list[str]:
    compiled = [name.replace("hf compiled", "torch.compile") for name in _compiled(found)]
    ours = ["ours", "first"] if _has_first(found) else ["ours"]
    return ["workload", "patches", *ours, "engine-like", "Hugging Face", *compiled, "of floor", "peak MiB HF / ours"]


def _rows(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, row in found["workloads"].items():
        ours = row["ms"].get("ours")
        peaks = row.get("peak_mib", {})
        rows.append(
            [
                name,
                str(row["tokens"]),
                f"{ours['median']:.2f}" if ours else "wrong",
                *([_first(row)] if _has_first(found) else []),
                _peer(row, row["engine_like"]),
                _peer(row, "hf"),
                *(_peer(row, compiled) for compiled in _compiled(found)),
                f"{row['floor_percent']:.0f} %" if ours else "–",
                f"{peaks['hf']:.0f} / {peaks['ours']:.0f}" if peaks else "–",
            ]
        )
    return rows


def _first(row: dict[str, Any]) -> str:
    first = row.get("first_ms", {}).get("ours")
    return f"{first['median']:.2f}" if first else "–"


def _peer(row: dict[str, Any], name: str | None) -> str:
    if name is None or name not in row["ms"]:
        return "–"
    kind = f" {name.removeprefix('engine-like ')}" if name.startswith("engine-like") else ""
    ratio = f" ({row['speedup'][name]['median']:.2f} x{kind})" if name in row.get("speedup", {}) else ""
    return f"{row['ms'][name]['median']:.2f}{ratio}"
