"""The tables in docs/ of what ships: GEMMs beside cuBLAS, attention beside its peers."""

from statistics import median
from typing import Any

Table = tuple[list[str], list[list[str]]]
CUBLAS = "cuBLAS + bias"
OPS = ("qkv", "proj", "fc1", "fc2", "patch", "merger_fc1", "merger_fc2")
LOOPS = (  # (label, cluster, what is left, unit, format)
    ("products alone", "none", "products", "clocks_of_a_step", ".0f"),
    ("loads alone", "none", "loads", "clocks_of_a_step", ".0f"),
    ("both", "none", "both", "clocks_of_a_step", ".0f"),
    ("both, us", "none", "both", "us_of_a_step", ".3f"),
    ("loads alone, weights shared by two", "weights shared", "loads", "clocks_of_a_step", ".0f"),
    ("both, weights shared by two", "weights shared", "both", "clocks_of_a_step", ".0f"),
    ("both, x shared by two", "x shared", "both", "clocks_of_a_step", ".0f"),
)
MEETINGS = {
    "fence": "through L2, by a fence and a counter",
    "poll": "through L2, by polling the data",
    "dsmem": "in a cluster, by `st.async`",
}
PLACES = {
    "pid": "by CTA, as launched",
    "order rows": "in order",
    "order 4x2": "in order, blocks of 4 x 2",
    "random": "at random",
    "dealt rows": "a column's over all GPCs",
}
ALONE = {
    "fc2 448": "fc2 448", "fc2 784": "fc2 784", "fc2 1344": "fc2 1344", "proj 784": "proj 784",
    "n3456 784": "784 x 3456, bias", "n4304 784": "784 x 4304, bias",
}  # fmt: skip
TOWERS = {
    "base 4x2": "blocks of 4 x 2",
    "attention=1": "later behind attention",
    "all1 planned": "later behind all",
    "fc1=1 early": "later behind fc1, fc2 early",
    "all1 early": "later behind all, fc2 early",
    "all3 early": "from main loops' ends on, fc2 early",
}
LAYOUTS = ("64 x 256", "16 x 1024", "1 x 1024", "1 x 784", "32 x 784", "1 x 1296", "1 x 4096", "1 x 16384")


def gemm_table(document: dict[str, Any], merge_unit: int = 4) -> Table:
    """Time over cuBLAS's with a bias alone, of the first tower of `fusedvit bench kernels`: operations by patch rows.

    Args:
        merge_unit: patch rows behind one row of a merger.
    """
    tower = document["rows"][0]["tower"]
    found = {}
    for row in document["rows"]:
        if row["tower"] == tower and row["op"] in OPS:
            rows = int(row["shape"].split(" x ")[0]) * (merge_unit if row["op"].startswith("merger") else 1)
            found[rows, row["op"]] = f"{row['us'] / row['peers_us'][CUBLAS]:.2f}" if row["us"] else "wrong"
    sizes = dict.fromkeys(rows for rows, _ in found)
    return ["rows", *OPS], [[str(rows), *(found.get((rows, op), "–") for op in OPS)] for rows in sizes]


def loops_table(document: dict[str, Any]) -> Table:
    """A step of K of main loops alone: what is left of them, in clocks or us, by tiles."""
    found = {(row["cluster"], row["does"], row["tile"]): row for row in document["rows"]}
    tiles = list(dict.fromkeys(tile for _, _, tile in found))
    lines = [
        [label, *(f"{found[cluster, does, tile][unit]:{backend}}" for tile in tiles)]
        for label, cluster, does, unit, backend in LOOPS
    ]
    return ["a step of K", *tiles], lines


def meetings_table(document: dict[str, Any]) -> Table:
    """Clocks until the parts of a product have met: ways by how much a CTA gives away."""
    found = {(row["parts"], row["kib_of_a_cta"], row["how"]): row["median_clocks"] for row in document["meetings"]}
    sizes = list(dict.fromkeys((parts, kib) for parts, kib, _ in found))
    head = ["clocks, the median CTA", *(f"{parts} parts, {kib} KiB" for parts, kib in sizes)]
    lines = [[label, *(f"{found[parts, kib, how]:.0f}" for parts, kib in sizes)] for how, label in MEETINGS.items()]
    return head, lines


def places_table(document: dict[str, Any]) -> Table:
    """Microseconds of products alone, begun when it is their turn and early: how tiles lie over SMs, by products."""
    us = {row["what"]: row["us"] for row in document["alone"]}
    lines = [
        [label, *(f"{us[what][f'{way} late']:.1f}, {us[what][f'{way} early']:.1f}" for what in ALONE)]
        for way, label in PLACES.items()
    ]
    return ["us late, early", *ALONE.values()], lines


def later_table(document: dict[str, Any]) -> Table:
    """Microseconds that a tower takes more or less than as planned: ways to launch, by sizes."""
    found = {row["size"]: row["us"] for row in document["towers"]}
    lines = [[label, *(f"{us[way] - us['base']:+.0f}" for us in found.values())] for way, label in TOWERS.items()]
    return ["us of a tower", *found], lines


def early_table(document: dict[str, Any]) -> Table:
    """Microseconds that towers take less than where of long launches attention's alone begins early."""
    return _ways_table(document["before"])


def late_table(document: dict[str, Any]) -> Table:
    """Microseconds that towers take less than with what begins early since."""
    return _ways_table(document["after"])


def attention_table(document: dict[str, Any]) -> Table:
    """Microseconds of what ships, and how many times as long the better peer takes: head widths by layouts."""
    found = {(row["head_dim"], row["layout"]): row for row in document["rows"] if row["growth"] == 1.0}
    widths = dict.fromkeys(width for width, _ in found)
    return ["head_dim", *LAYOUTS], [[str(w), *(_attention(found.get((w, name))) for name in LAYOUTS)] for w in widths]


def schedules_table(document: dict[str, Any]) -> Table:
    """Microseconds of every contender but what ships, by layouts."""
    found = {(row["head_dim"], row["layout"]): row["us"] for row in document["rows"] if row["growth"] == 1.0}
    layouts = list(dict.fromkeys(layout for _, layout in found))
    lines = []
    for width in dict.fromkeys(width for width, _ in found):
        rows = [found.get((width, layout), {}) for layout in layouts]
        names = dict.fromkeys(name for us in rows for name in us if name not in ("ships", "apart"))
        lines += [[f"{width}: {name}", *(_us(us.get(name)) for us in rows)] for name in names]
    return ["head_dim: schedule", *layouts], lines


def sustained_table(document: dict[str, Any]) -> Table:
    """Microseconds without a pause between launches, and the clock in MHz, by layouts."""
    found = {
        (row["head_dim"], one["name"], row["layout"]): f"{_us(one['us'])} ({one['mhz']:.0f})"
        for row in document["rows"]
        for one in row["sustained"]
    }
    layouts = list(dict.fromkeys(layout for *_, layout in found))
    kinds = dict.fromkeys((width, name) for width, name, _ in found)
    lines = [[f"{w}: {name}", *(found.get((w, name, layout), "–") for layout in layouts)] for w, name in kinds]
    return ["head_dim: schedule", *layouts], lines


def products_table(document: dict[str, Any]) -> Table:
    """Clocks that an SM's tensor cores take for an instruction, two warpgroups at work, by its columns."""
    found = {(row["left"], row["columns"]): row["clocks"]["2"] / row["instructions"] / 2 for row in document["rows"]}
    columns = sorted({columns for _, columns in found})
    kinds = dict.fromkeys(left for left, _ in found)
    lines = [[left, *(_us(found.get((left, n))) for n in columns)] for left in kinds]
    return ["clocks, left operand in", *(f"{n} columns" for n in columns)], lines


def energy_table(document: dict[str, Any]) -> Table:
    """Microseconds in bursts and without a pause, and millijoules of the latter: operations alone, by tiles."""
    found = {(_product(row), row["tile"]): row for row in document["rows"]}
    tiles = list(dict.fromkeys(tile for _, tile in found))
    lines = [[op, *(_energy(found.get((op, tile))) for tile in tiles)] for op in dict.fromkeys(op for op, _ in found)]
    return ["us in bursts, without a pause (mJ)", *tiles], lines


def multicast_table(document: dict[str, Any]) -> Table:
    """The same of one tile alone and in clusters of two that share x, cuBLAS beside both; medians of two."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in document["multicast"]:
        found.setdefault((f"{row['process']}: {row['tile']}", _product(row)), []).append(row)
    kinds, sizes = dict.fromkeys(kind for kind, _ in found), dict.fromkeys(size for _, size in found)
    lines = [[kind, *(_energy(_medians(found[kind, size])) for size in sizes)] for kind in kinds]
    return ["us in bursts, without a pause (mJ)", *sizes], lines


def turns_table(document: dict[str, Any]) -> Table:
    """Time over cuBLAS's with a bias alone, each kernel's best height in brackets, then what is chosen in its run; of
    the first tower."""
    tower = document["rows"][0]["tower"]
    forms = list(dict.fromkeys(row["backend"] for row in document["rows"]))
    of_it = [row for row in document["rows"] if row["tower"] == tower]
    found = {(_product(row), row["backend"]): row for row in of_it}
    lines = [
        [what, *(_best_height(found.get((what, backend))) for backend in forms)]
        for what in dict.fromkeys(what for what, _ in found)
    ]
    return ["best (rows of a tile), as chosen", *forms], lines


def _ways_table(runs: list[dict[str, Any]]) -> Table:
    """Runs of `bench.beside`, a tower each, of the same sizes and ways: a line for each size, milliseconds of the way
    that others are compared with and what these save."""
    first, *ways = dict.fromkeys(row["way"] for row in runs[0]["rows"])
    lines: list[list[str]] = []
    for run in runs:
        found = {(row["size"], row["way"]): row for row in run["rows"]}
        for size in dict.fromkeys(row["size"] for row in run["rows"]):
            saved = [f"{found[size, way]['saved_us']:+.0f}" for way in ways]
            ms = f"{found[size, first]['ms']['median']:.2f}"
            lines.append([f"{run['tower']}, {size}", ms, *saved])
    return ["us less of a tower", "ms", *ways], lines


def _product(row: dict[str, Any]) -> str:
    return f"{row['op']}, {row['rows']} rows"


def _medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {key: median(row[key] for row in rows) for key in ("burst_us", "us", "millijoules")}


def _energy(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    figures = f"{row['burst_us']:.1f}, {row['us']:.1f} ({row['millijoules']:.1f})"
    return f"**{figures}**" if row.get("chosen") else figures


def _best_height(row: dict[str, Any] | None) -> str:
    if row is None or not row["us"]:
        return "–"
    height = min(row["us"], key=row["us"].__getitem__)
    return f"{row['us'][height] / row['cublas_us']:.2f} ({height}), {row['chosen_us'] / row['cublas_us']:.2f}"


def _us(us: float | None) -> str:
    return "–" if us is None else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _attention(row: dict[str, Any] | None) -> str:
    if row is None or "ships" not in row["us"]:
        return "–" if row is None else "wrong"
    return f"{row['us']['ships']:.1f}" + (f" ({row['ratio']:.2f})" if "ratio" in row else "")
