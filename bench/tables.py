"""Tables of the documents in bench/results, for a terminal and for the pages that report.py writes: each column is a
function of a row."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fusedvit.bench.towers import GEOMETRIES
from fusedvit.checks.fallback import ADVICE
from fusedvit.families.base import Family
from fusedvit.families.registry import FAMILIES
from fusedvit.families.unsupported import UNSUPPORTED

CUBLAS = "cuBLAS + bias"
LINEARS = ("patch", "qkv", "proj", "fc1", "fc2", "deepstack_fc1", "merger_fc1", "merger_fc2")
MERGE_UNIT = 4  # patch tokens behind one row of a merger
HEADLINE = ("1 x 224 px", "1 x 448 px", "1 x 1024 px", "8 x 448 px", "video, 64 frames 448 px")
SERVED, REPLAY = "vLLM graphs as served", "its replay alone"
VLLM_PEERS = ("vLLM eager", SERVED, "vLLM graph of the exact size", REPLAY)
PATCHES = ("1024", "4096", "6272")  # of the families' table
ELSEWHERE, NOT_MEASURED, NONE = {"Qwen3-VL-8B": "see performance.md"}, "not measured", "–"
ACTIVATIONS = {
    "gelu_tanh": "GELU (tanh)",
    "gelu": "GELU",
    "quick_gelu": "quick GELU",
    "swiglu": "SwiGLU",
    "geglu_tanh": "GEGLU (tanh)",
}
POSITIONS = {2: "two position tables, of rows and columns", 4: "bilinear position table", 16: "bicubic position table"}
TAILS = {
    "merger": "merger",
    "downsample": "convolution and gated merger",
    "norm": "final norm (merging is outside the tower)",
    "pool": "mean of a merged token's patches",
}
Row = dict[str, Any]


class Table(NamedTuple):
    """Headings, and rows with a cell for each."""

    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> list[str]:
        """The table's lines in Markdown."""
        return ["| " + " | ".join(line) + " |" for line in (self.head, ["---"] * len(self.head), *self.rows)]

    def show(self, title: str, console: Any) -> None:
        """Prints the table on a rich console."""
        from rich import table as rich

        shown = rich.Table(title=title, title_justify="left")
        for head in self.head:
            shown.add_column(head, overflow="fold")  # names that are cut off may read alike
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)


Column = str | Callable[[Any], str]  # a key of the row, or a function of the row


def table(rows: Iterable[Any], columns: Mapping[str, Column]) -> Table:
    """A line for each of `rows`, with a cell for each column."""
    cells = [[str(row[of]) if isinstance(of, str) else of(row) for of in columns.values()] for row in rows]
    return Table([*columns], cells)


def named(rows: Mapping[str, Row]) -> list[Row]:
    """The rows, each with its name added."""
    return [row | {"name": name} for name, row in rows.items()]


def _ms(spread: dict[str, float] | None, missing: str = NONE) -> str:
    return f"{spread['median']:.2f}" if spread else missing


# Whole towers


def tower_table(rows: dict[str, Row]) -> Table:
    """Rows of `fusedvit bench` for one tower, by workload. Ratios are a peer's time over ours, the median of rounds."""
    compiled = dict.fromkeys(name for row in rows.values() for name in row["ms"] if name.startswith("hf compiled"))
    peers = {"hf": "Hugging Face"} | {name: name.replace("hf compiled", "torch.compile") for name in compiled}
    columns: dict[str, Column] = {
        "workload": "name",
        "patches": "tokens",
        "ours, ms": _ours,
        "ours, CPU caches cold, ms": lambda row: _ms(row.get("first_ms", {}).get("ours")),
        "engine-like, ms (ratio)": _engine,
        **{f"{said}, ms (ratio)": partial(_peer, name=name) for name, said in peers.items()},
        "of roofline": lambda row: f"{row['floor_percent']:.0f} %" if "floor_percent" in row else NONE,
        "peak memory, MiB: Hugging Face / ours": _peaks,
    }
    return table(named(rows), columns)


def _ours(row: Row) -> str:
    return _ms(row["ms"].get("ours"), "wrong")


def _engine(row: Row) -> str:
    """The time of the fastest engine-like encoder, and the name of its attention."""
    name = row["engine_like"]
    return _peer(row, name) + (f" {name.removeprefix('engine-like ')}" if name else "")


def _peer(row: Row, name: str | None) -> str:
    if name is None or name not in row["ms"]:
        return NONE
    ratio = row.get("speedup", {}).get(name)
    return _ms(row["ms"][name]) + (f" ({ratio['median']:.2f})" if ratio else "")


def _peaks(row: Row) -> str:
    peaks = row.get("peak_mib")
    return f"{peaks['hf']:.0f} / {peaks['ours']:.0f}" if peaks else NONE


def headline_table(rows: dict[str, Row], inside_vllm: dict[str, Row]) -> Table:
    """Five workloads of one tower: inside vLLM on an H100, then alone on an H200, each with its peers.

    Args:
        rows: workloads of the document of whole towers.
        inside_vllm: workloads of the document of `fusedvit bench --vllm`.
    """
    both = [row | {"name": name, "served": inside_vllm[name]} for name, row in rows.items() if name in HEADLINE]
    return table(
        both,
        {
            "workload": "name",
            "patches": "tokens",
            "H100: in vLLM, ours, ms": lambda row: _ours(row["served"]),
            "vLLM's graphs (ratio)": lambda row: _served(row["served"], SERVED),
            "their replay alone (ratio)": lambda row: _served(row["served"], REPLAY),
            "H200: ours, ms": _ours,
            "engine-like, ms (ratio)": lambda row: _peer(row, row["engine_like"]),
            "Hugging Face, ms (ratio)": lambda row: _peer(row, "hf"),
        },
    )


def vllm_table(rows: dict[str, Row]) -> Table:
    """Workloads inside vLLM: vLLM's times and their ratios to ours."""
    columns: dict[str, Column] = {
        "workload": "name",
        **{f"{peer}, ms (ratio)": partial(_served, peer=peer) for peer in VLLM_PEERS},
        "ours, ms": _ours,
        "vLLM's rms error": lambda row: f"{row['parity']['vLLM eager']['rms_error']:.4f}",
        "our rms error": lambda row: f"{row['parity']['ours']['rms_error']:.4f}",
    }
    return table(named(rows), columns)


def engine_table(runners: dict[str, dict[str, Any]]) -> Table:
    """A whole vLLM engine without and with the plugin, by its model runner: memory, times, and how far its answers are
    from Hugging Face's."""
    engines = [found[side] for found in runners.values() for side in ("vllm", "fusedvit")]
    timed, woken = [engine["timed"] for engine in engines], [engine["wake s"] for engine in engines]
    asleep = [engine["free MiB"]["asleep on level 1"] / 1024 for engine in engines]
    rows = [
        ["blocks of the KV cache", *(f"{engine['KV blocks']:,}" for engine in engines)],
        ["GPU memory free asleep, GiB", *(f"{gib:.1f}" for gib in asleep)],
        ["waking from level 1, s", *(f"{s['from level 1']:.2f}" for s in woken)],
        ["waking from level 2, and loading weights, s", *(f"{s['from level 2']:.2f}" for s in woken)],
        [f"{timed[0]['requests']} requests of an image of 448 x 448 px, s", *(f"{t['s']:.2f}" for t in timed)],
        ["of these in encoder steps, s", *(f"{t['in the encoder, s']:.2f}" for t in timed)],
    ]
    answers = [found["answers"] for found in runners.values()]
    for request in (name for name, row in answers[0]["fresh"].items() if "ours - right" in row):
        what = f"largest error of a log probability, {request}: fresh, woken, reloaded"
        rows.append([what, *(_errors(each, request, whose) for each in answers for whose in ("theirs", "ours"))])
    heads = (f"{runner}, {side}" for runner in runners for side in ("vLLM", "with fusedvit"))
    return Table(["figure", *heads], rows)


def _errors(answers: dict[str, Any], request: str, whose: str) -> str:
    """The range of an error over the stages of an engine's life."""
    found = [stage[request][f"{whose} - right"] for stage in answers.values()]
    return f"{min(found):.3f} to {max(found):.3f}"


def _served(row: Row, peer: str) -> str:
    """A time inside vLLM, with its ratio to ours if ours is right; the time of NaN outputs is marked."""
    gate = row["parity"].get(peer, {})
    if peer not in row["ms"]:
        return "wrong" if gate else NONE
    said = [f"{row['ratio'][peer]['median']:.2f}"] if "ratio" in row else []
    said += ["NaN"] if gate.get("nan") else []
    return _ms(row["ms"][peer]) + (f" ({', '.join(said)})" if said else "")


def show_towers(document: dict[str, Any], console: Any) -> None:
    """Prints a document of `fusedvit bench` on a rich console: a table per tower, then failures and wrong outputs."""
    for tower, found in document["towers"].items():
        tower_table(found["workloads"]).show(f"{tower} (ratio: a peer's time over ours)", console)
        for workload, reason in found.get("failed", {}).items():
            console.print(f"{workload}: {reason}", style="red", markup=False)
        for workload, row in found["workloads"].items():
            for name, reason in row["failed"].items():
                console.print(f"{workload}: {name} does not run: {reason}", style="yellow", markup=False)
            for name, gate in row["parity"].items():
                if not gate["passed"]:
                    said = f"{workload}: {name} is not right and gets no time: {gate['reason']}"
                    console.print(said, style="red", markup=False)


def any_wrong(document: dict[str, Any]) -> bool:
    """Whether a contender of a document of `fusedvit bench` is wrong, or a workload failed."""
    rows = [row for found in document["towers"].values() for row in found["workloads"].values()]
    gates = [gate["passed"] for row in rows for gate in row["parity"].values()]
    failed = any(found.get("failed") for found in document["towers"].values())
    return failed or not all(gates) or any(row["us"] is None for row in document.get("operations", []))


# Operations alone


def operation_table(rows: list[Row]) -> Table:
    """All rows of `fusedvit bench kernels`, for a terminal."""

    def peers(row: Row) -> str:
        us = row["us"]
        return ", ".join(f"{n} {t:.1f}" + (f" ({t / us:.2f})" if us else "") for n, t in row["peers_us"].items())

    columns: dict[str, Column] = {"operation": "op", "shape": "shape", "backend": "backend"}
    columns["ours, us"] = lambda row: f"{row['us']:.1f}" if row["us"] else "wrong"
    columns["peers, us (ratio)"] = peers
    if any(row["floor_us"] is not None for row in rows):  # on a CPU there is none
        columns["roofline, us"] = lambda row: f"{row['floor_us']:.1f}"
    return table(rows, columns)


def gemm_table(rows: list[Row]) -> Table:
    """Every linear layer of the first tower in `rows`, by patch tokens."""
    cells = {}
    for row in rows:
        if row["tower"] == rows[0]["tower"] and row["op"] in LINEARS:
            unit = MERGE_UNIT if row["op"].startswith(("merger", "deepstack")) else 1
            patches = int(row["shape"].split(" x ")[0]) * unit
            us = row["us"]
            cells[patches, row["op"]] = f"{us:.1f} ({row['peers_us'][CUBLAS] / us:.2f})" if us else "wrong"
    sizes, there = dict.fromkeys(at for at, _ in cells), [op for op in LINEARS if any(op == of for _, of in cells)]
    head = ["patches", *(f"{op}, us (ratio to cuBLAS)" for op in there)]
    return Table(head, [[str(at), *(cells.get((at, op), NONE) for op in there)] for at in sizes])


# Accuracy


def error_table(towers: dict[str, Row]) -> Table:
    """The error ratios of the fused towers of a document of `fusedvit bench`, over its workloads."""

    def ratios(row: Row, of: str) -> str:
        found = [verdict[of] for verdict in row["verdicts"]]
        return f"{statistics.median(found):.2f} / {max(found):.2f}"

    rows = {
        name: {"verdicts": [row["parity"]["ours"] for row in found["workloads"].values()]}
        for name, found in towers.items()
    }
    columns: dict[str, Column] = {
        "tower": "name",
        "workloads": lambda row: str(len(row["verdicts"])),
        "largest error ratio: median / largest": partial(ratios, of="largest"),
        "rms error ratio: median / largest": partial(ratios, of="rms"),
        "out of tolerance": lambda row: str(sum(not verdict["passed"] for verdict in row["verdicts"])),
    }
    return table(named(rows), columns)


def trust_table(faults: dict[str, Row], name: str, documents: Mapping[str, dict[str, Any]]) -> Table:
    """A row for each fault and each test or check that searches for it: its figure, its document and its date.

    Args:
        faults: rows of `tests.trust`, by fault.
        name: the name of the document that holds them.
        documents: documents of checks on a GPU, by name; the first that holds a check counts.
    """
    first_wins = reversed([*documents.items()])
    checks = {check: (found, file, of["date"]) for file, of in first_wins for check, found in of["trust"].items()}
    rows = []
    for key, fault in faults.items():
        if fault["tests"]:
            figure = f"{fault['passed']} tests pass" if "passed" in fault else NOT_MEASURED
            figure += f", {fault['failed']} fail" if fault.get("failed") else ""
            rows.append([key, fault["fault"], figure, f"`{name}`", fault.get("date", NONE)])
        for check in fault["gpu"]:
            found, file, date = checks.get(check, ({}, NONE, NONE))
            figure = f"{check}: {_counts(found) if found else NOT_MEASURED}"
            rows.append([key, fault["fault"], figure, f"`{file}`" if found else file, date])
    return Table(["id", "fault", "figure", "document", "date"], rows)


def _counts(found: Row) -> str:
    """The plain numbers of a check, or the error that it raised."""
    if "error" in found:
        return "raised " + found["error"].strip().splitlines()[-1].replace("|", "/")
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float) and name != "took_s"}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items())


# Families


def family_table(gpu: dict[str, Row], cpu: dict[str, Row]) -> Table:
    """A row for every geometry that was measured on a GPU or a CPU, in the order of the registry.

    Raises:
        ValueError: a registered family was measured on neither.
    """
    cpu, gpu = ({name: found for name, found in each.items() if "tower" in found} for each in (cpu, gpu))
    rows = []
    for family in FAMILIES:
        names = {name: found for name, found in (cpu | gpu).items() if found["class"] in family.class_names}
        if not names:
            raise ValueError(f"expected a measurement of {family.name}, which is registered; got none")
        for name, found in names.items():
            others = GEOMETRIES[name].others
            also = f" (also {others})" if others else ""
            of = {"family": family.name, "classes": _classes(family), "name": name, "checkpoint": name + also}
            rows.append(of | {"tower": found["tower"], "gpu": gpu.get(name, {}), "cpu": cpu.get(name, {})})
    columns: dict[str, Column] = {
        "family": "family",
        "tower classes": "classes",
        "checkpoint": "checkpoint",
        "tower": lambda row: _numbers(row["tower"]),
        "parts": lambda row: _parts(row["tower"]),
        "error ratio, bf16: largest / rms": lambda row: _error(row["gpu"], ELSEWHERE.get(row["name"], NOT_MEASURED)),
        "error ratio, fp32: largest / rms": lambda row: (
            _error(row["cpu"], NOT_MEASURED) + (f", {row['cpu']['blocks']} blocks" if "blocks" in row["cpu"] else "")
        ),
        **{f"{n} patches, ms: Hugging Face → ours (ratio)": partial(_family_time, patches=n) for n in PATCHES},
    }
    return table(rows, columns)


def reason_table() -> Table:
    """The reasons why a call takes the original code, as `stats()` and warnings name them."""
    return Table(["reason", "what it means, or what to do"], [[f"`{kind}`", said] for kind, said in ADVICE.items()])


def unsupported_table() -> Table:
    """Tower classes that are known and run their original code."""
    return Table(["tower class", "reason"], [[f"`{name}`", why] for name, why in UNSUPPORTED.items()])


def _classes(family: Family) -> str:
    also = f"; also in {', '.join(f'`{kind}`' for kind in family.also_in)}" if family.also_in else ""
    return ", ".join(f"`{cls}`" for cls in family.class_names) + also


def _numbers(tower: Row) -> str:
    heads = f"{tower['num_heads']} heads of {tower['head_dim']}"
    if "kv_heads" in tower:
        heads += f" ({tower['kv_heads']} key-value heads)"
    sizes = f"MLP {tower['intermediate_size']}, patch {tower['patch_size']}, output {tower['out_size']}"
    return f"{tower['depth']} blocks of {tower['hidden_size']}, {heads}, {sizes}"


def _parts(tower: Row) -> str:
    """The parts that distinguish a family, from a spec's numbers without its defaults."""
    limit = f" clamped at {tower['glu_limit']:g}" if "glu_limit" in tower else ""
    parts = ["RMSNorm" if tower.get("norm") == "rms" else "LayerNorm"]
    parts.append(ACTIVATIONS[tower.get("activation", "gelu_tanh")] + limit)
    if tower.get("qk_norm"):
        parts.append("norms of q, k and v" if tower.get("v_norm") else "norms of q and k")
    if tower.get("sandwich"):
        parts.append("norms behind attention and MLP")
    if tower.get("clipped"):
        parts.append("clipped linear layers")
    if "position_side" in tower:
        parts.append(POSITIONS[tower.get("position_taps", 4)])
    if "window" in tower:
        blocks = ", ".join(map(str, tower["full_attention"]))
        parts.append(f"windows of {tower['window']} x {tower['window']} merged tokens except in blocks {blocks}")
    if tower.get("padded"):
        parts.append("padded images")
    parts.append(TAILS[tower.get("tail", "merger")] + (", standardised" if tower.get("standardized") else ""))
    if tower.get("deepstack"):
        parts.append(f"{len(tower['deepstack'])} deepstack mergers")
    return ", ".join(parts)


def _error(found: Row, missing: str) -> str:
    parity = found.get("parity", {}).values()
    if not parity:
        return missing
    if not all(verdict["passed"] for verdict in parity):
        return "out of tolerance"
    return f"{max(v['largest'] for v in parity):.2f} / {max(v['rms'] for v in parity):.2f}"


def _family_time(row: Row, patches: str) -> str:
    cost = row["gpu"].get("cost", {}).get(patches)
    if cost is None:
        return ELSEWHERE.get(row["name"], NOT_MEASURED)
    return f"{cost['hf']['median']:.1f} → {cost['ours']['median']:.1f} ({cost['speedup']['median']:.2f})"


# Pixels, a corpus, the first call


def pixel_table(rows: list[Row]) -> Table:
    """Wall time from decoded images in host memory to tokens, by processor and tower."""

    def ms(row: Row, who: str) -> str:
        return _ms(row["ms"].get(who))

    columns: dict[str, Column] = {"images": "workload", **{who: partial(ms, who=who) for who in rows[0]["ms"]}}
    columns["ours, CPU caches cold"] = lambda row: _ms(row.get("first_ms", {}).get("ours"))
    columns["target"] = lambda row: NONE if row["bar_ms"] is None else f"{row['bar_ms']:g}"
    return table(rows, columns | {"bytes copied, of fp32 patches'": lambda row: f"{row['bytes']['ratio']:.3f}"})


def rate_table(corpus: dict[str, Any]) -> Table:
    """Images a second from JPEG bytes to tokens."""
    rates = corpus["images_per_s"]
    return Table(list(rates), [[f"{rate:.0f}" for rate in rates.values()]])


def bar_table(figures: Iterable[tuple[str, float, str]]) -> Table:
    """Figures with their targets.

    Args:
        figures: (the figure's name, its value, its target in words).
    """
    return Table(["figure", "found", "target"], [[what, f"{found:.2f}", bar] for what, found, bar in figures])
