"""A bench document as flat rows, for CSV and tables."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = (
    "tower", "workload", "patches", "contender", "clock", "ms", "low_ms", "high_ms", "rounds", "first_ms",
    "speedup_of_ours", "speedup_low", "speedup_high", "floor_ms", "floor_percent", "parity", "largest_error_ratio",
    "rms_error_ratio", "peak_mib",
)  # fmt: skip


def flat(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per tower, workload and contender, those that failed their gate included (without a time)."""
    for tower, found in document["towers"].items():
        for workload, row in found["workloads"].items():
            for name, clock in row["clock"].items():
                yield {"tower": tower, "workload": workload, **_row(row, name), "clock": clock}


def _row(row: dict[str, Any], name: str) -> dict[str, Any]:
    ms, gate, speedup = (row.get(part, {}).get(name, {}) for part in ("ms", "parity", "speedup"))
    return {
        "patches": row["tokens"],
        "contender": name,
        "ms": ms.get("median"),
        "low_ms": ms.get("low"),
        "high_ms": ms.get("high"),
        "rounds": ms.get("rounds"),
        "first_ms": row.get("first_ms", {}).get(name, {}).get("median"),
        "speedup_of_ours": speedup.get("median"),
        "speedup_low": speedup.get("low"),
        "speedup_high": speedup.get("high"),
        "floor_ms": row["floor_ms"],
        "floor_percent": 100 * row["floor_ms"] / ms["median"] if ms else None,
        "parity": gate.get("passed"),
        "largest_error_ratio": gate.get("largest"),
        "rms_error_ratio": gate.get("rms"),
        "peak_mib": row.get("peak_mib", {}).get(name),
    }


def write_csv(document: dict[str, Any], path: Path) -> None:
    """`flat` under a head of `FIELDS`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(flat(document))
