"""`python -m fusedvit.bench.readme`: writes the figures of README and docs/ from bench/results/, so that none is typed.

Marks in a document name the sections that are written.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedvit.bench import family_documents
from fusedvit.bench.readme_families import explanation as families_explained
from fusedvit.bench.readme_families import family_table, unsupported_table
from fusedvit.bench.readme_kernels import (
    attention_table,
    early_table,
    energy_table,
    gemm_table,
    late_table,
    later_table,
    loops_table,
    meetings_table,
    multicast_table,
    places_table,
    products_table,
    schedules_table,
    sustained_table,
    turns_table,
)
from fusedvit.bench.readme_speed import Table, explanation, speed_tables, sweep_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SPEED, SWEEP = "h200-bench.json", "h200-sweep.json"
FAMILIES, FAMILIES_CPU = "h200-families*.json", "cpu-families.json"  # of several runs the later by name counts
BEGIN, END = "<!-- {}: written by bench/readme.py -->", "<!-- end of {} -->"


def _load(name: str) -> dict[str, Any]:
    with open(RESULTS / name, encoding="utf-8") as file:
        return json.load(file)


def _run(name: str, passport: dict[str, str], root: str = "") -> str:
    gpu = passport["gpu"] if passport["gpu"] != "none" else "CPU"
    return (
        f"{gpu}, torch {passport['torch']}, Triton {passport['triton']}, "
        f"transformers {passport['transformers']}; "
        f"[`bench/results/{name}`]({root}bench/results/{name}), `{passport['command']}`"
    )


def _origin(name: str, passport: dict[str, str], root: str = "") -> str:
    """Where a document's figures come from. `root`: the checkout's, from the folder of the text that says so."""
    return f"{_run(name, passport, root)} {_commit(passport)}"


def _commit(passport: dict[str, str]) -> str:
    return "(commit not recorded)" if passport["commit"] == "unknown" else f"at {passport['commit'][:7]}"


def _origins(name: str, document: dict[str, Any]) -> str:
    """Of a document of several runs: each machine and version once, and the commits."""
    passports = family_documents.passports([document])
    commits = dict.fromkeys(passport["commit"][:7] for passport in passports)
    runs = dict.fromkeys(_run(name, passport) for passport in passports)
    return f"{'; '.join(runs)} at {', '.join(commits)}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def cost_table(parity: dict[str, Any], graphs: dict[str, Any]) -> list[str]:
    """Wall time, launches and memory of one call: Hugging Face, fused eager, fused through graphs."""
    rows = []
    for name, row in parity["cost"].items():
        if "hf" not in row:
            continue
        hf, fused, graph = row["hf"], row["fused"], graphs["cost"]["workloads"][name]["graph_wall_ms"]
        rows.append(
            [
                name,
                str(row["tokens"]),
                f"{hf['ms']:.1f}",
                f"{fused['ms']:.1f} ({row['speedup']:.2f} x)",
                f"{graph:.1f} ({hf['ms'] / graph:.2f} x)",
                f"{hf['kernels']} / {fused['kernels']}",
                f"{hf['peak_mib']:.0f} / {fused['peak_mib']:.0f}",
            ]
        )
    head = [
        "workload",
        "patches",
        "Hugging Face ms",
        "eager ms",
        "graphs ms",
        "kernels HF / fused",
        "peak MiB HF / fused",
    ]
    return _table(head, rows)


def accuracy_table(parity: dict[str, Any]) -> list[str]:
    """Error against fp32 over Hugging Face's own error in bf16, by level and weights."""
    rows = []
    for label, found in parity["summary"].items():
        largest, rms = found["ratio_max"], found["ratio_rms"]
        spread = [f"{d['p50']:.2f} / {d['p99']:.2f} / {d['max']:.2f}" for d in (largest, rms)]
        rows.append([label, str(largest["count"]), *spread, str(found["failures"])])
    return _table(
        ["level, weights", "comparisons", "largest error: p50 / p99 / max", "rms error: p50 / p99 / max", "failures"],
        rows,
    )


def trust_lines(trust: dict[str, Any]) -> list[str]:
    """What was compared, and how much of it was wrong."""
    same, pairs, held, threads = (
        trust[name] for name in ("graph_equals_eager", "equal_totals", "held_outputs", "threads_and_streams")
    )
    return [
        "Replayed graphs against eager runs, bit for bit, every static buffer poisoned with NaN between replays:",
        f"{same['wrong']} of {same['batches']} random batches differ, {same['with_nan']} hold a NaN;",
        f"{pairs['wrong']} of {pairs['pairs']} pairs of equal totals with other boundaries differ;",
        f"{threads['wrong']} of {threads['calls']} calls from 8 threads on 4 streams each are wrong;",
        f"{held['changed']} of {held['outputs']} held outputs changed.",
    ]


def speed_lines() -> list[str]:
    """Whole towers against the peers, by the latest run of `fusedvit bench`."""
    if not (RESULTS / SPEED).exists():
        return []
    document = _load(SPEED)
    lines = [*explanation(document), "", *_by_tower(speed_tables(document))]
    return [*lines, f"From: {_origin(SPEED, document['passport'])}.", ""]


def sweep() -> str:
    """Single images of many sizes and videos of many lengths."""
    document = _load(SWEEP)
    return "\n".join([*_by_tower(sweep_tables(document)), f"From: {_origin(SWEEP, document['passport'], '../')}."])


def _by_tower(tables: dict[str, Table]) -> list[str]:
    return [line for tower, table in tables.items() for line in (f"{tower}'s tower:", "", *_table(*table), "")]


def figures() -> str:
    """The README's section between the two marks."""
    parity, graphs = _load("h200-parity.json"), _load("h200-graphs.json")
    stats = graphs["cost"]["stats"]
    fp32 = max(parity["fp32_relative_error"].values())
    one = graphs["cost"]["workloads"]["1 x 448 px"]
    largest = max(stats["graphs"]["token_budgets"])
    lines = [
        *speed_lines(),
        "Qwen3-VL-8B's tower (27 blocks, 1152 channels), bf16, random weights at realistic scale. Hugging Face runs",
        "`sdpa`; times are medians of wall time, both in turns in one run for eager, in a run of its own for graphs.",
        "",
        *cost_table(parity, graphs),
        "",
        f"Prepared copies of weights hold {stats['weights_mib']:.0f} MiB, graphs and their buffers "
        f"{one['held_mib']:.0f} MiB for budgets up to {largest} tokens.",
        "",
        "Error against fp32, ours over Hugging Face's in bf16 (1.00 = as exact; the rule allows 2.00 for the largest",
        "error and 1.25 for rms); massive channels: four residual channels planted at +-200.",
        "",
        *accuracy_table(parity),
        "",
        f"In fp32 the largest relative difference to Hugging Face is {fp32:.1e}.",
        "",
        *trust_lines(graphs["trust"]),
        "",
        f"From: {_origin('h200-parity.json', parity['passport'])}; {_origin('h200-graphs.json', graphs['passport'])}.",
    ]
    return "\n".join(lines)


def families() -> str:
    """The README's tables of supported and unsupported towers."""
    documents = {path.name: _load(path.name) for path in sorted(RESULTS.glob(FAMILIES))}
    found = family_documents.merged(documents.values())["families"]
    documents[FAMILIES_CPU] = _load(FAMILIES_CPU)
    origins = [_origins(name, document) for name, document in documents.items()]
    lines = [
        *_table(*family_table(found, documents[FAMILIES_CPU]["families"])),
        "",
        *families_explained(found),
        "",
        f"From: {'; '.join(origins)}.",
        "",
        "Known, and not fused:",
        "",
        *_table(*unsupported_table()),
    ]
    return "\n".join(lines)


def gemms() -> str:
    """Each operation of a tower alone."""
    return _of_one_run("h200-kernels.json", gemm_table)


def loops() -> str:
    """What bounds a GEMM's main loop, and the meeting of its parts."""
    return _of_one_run("h200-main-loops.json", loops_table, meetings_table)


def places() -> str:
    """Where tiles lie, and when the next launch may begin."""
    return _of_one_run("h200-placement.json", places_table, later_table)


def early() -> str:
    """Which long launches begin early."""
    return _of_one_run("h200-early.json", early_table, late_table)


def energy() -> str:
    """What products of many rows take of time and of energy."""
    return _of_one_run("h200-energy.json", energy_table, multicast_table)


def turns() -> str:
    """Kernels that hide a tile's end otherwise."""
    return _of_one_run("h200-turns.json", turns_table)


def attention() -> str:
    """Attention alone, at every width of heads."""
    return _of_one_run("h200-attention.json", attention_table)


def schedules() -> str:
    """Each schedule of it, in turns."""
    return _of_one_run("h200-attention.json", schedules_table)


def without_pause() -> str:
    """Some of them under load without a pause."""
    return _of_one_run("h200-attention-sustained.json", sustained_table)


def products() -> str:
    """What an instruction of so many columns takes."""
    return _of_one_run("h200-products.json", products_table)


def _of_one_run(name: str, *tables: Callable[[dict[str, Any]], Table]) -> str:
    document = _load(name)
    lines = [line for table in tables for line in (*_table(*table(document)), "")]
    return "\n".join([*lines, f"From: {_origin(name, document['passport'], '../')}."])


DOCUMENTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"families": families, "figures": figures},
    "docs/hopper.md": {
        "gemms": gemms,
        "places": places,
        "early": early,
        "loops": loops,
        "turns": turns,
        "energy": energy,
    },
    "docs/speed.md": {"sweep": sweep},
    "docs/hopper-attention.md": {
        "attention": attention,
        "schedules": schedules,
        "sustained": without_pause,
        "products": products,
    },
}


def rewritten(text: str, document: str) -> str:
    """The `text` of one of `DOCUMENTS` with fresh figures."""
    for name, section in DOCUMENTS[document].items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{section()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(rewritten(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
