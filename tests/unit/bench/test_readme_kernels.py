"""The tables in docs/ say what was measured, and what was not."""

from typing import Any

from fusedvit.bench.readme_kernels import (
    ALONE,
    CUBLAS,
    LAYOUTS,
    OPS,
    PLACES,
    TOWERS,
    attention_table,
    energy_table,
    gemm_table,
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


def gemm(op: str, rows: int, us: float | None, tower: str = "first") -> dict[str, Any]:
    return {"tower": tower, "op": op, "shape": f"{rows} x 8 x 8", "us": us, "peers_us": {CUBLAS: 10.0}}


def test_gemms_by_patch_rows() -> None:
    rows = [gemm("qkv", 256, 12.0), gemm("merger_fc1", 64, 9.0), gemm("qkv", 784, None), gemm("attention", 4, 1.0)]
    head, found = gemm_table({"rows": [*rows, gemm("qkv", 1296, 1.0, "second")]})
    assert head == ["rows", *OPS] and all(len(row) == len(head) for row in found)
    assert found[0] == ["256", "1.20", "–", "–", "–", "–", "0.90", "–"], "a merger has a quarter of the rows"
    assert found[1] == ["784", "wrong", *["–"] * 6] and len(found) == 2


def test_attention_by_layouts() -> None:
    def row(layout: str, us: dict[str, float], **more: Any) -> dict[str, Any]:
        return {"head_dim": 72, "layout": layout, "growth": 1.0, "us": us, **more}

    rows = [row("64 x 256", {"ships": 10.04, "fa3": 12.0}, ratio=1.195), row("1 x 784", {"fa3": 12.0})]
    rows += [row("1 x 4096", {"ships": 150.0}), row("1 x 1024", {"ships": 1.0}) | {"growth": 200.0}]
    head, (found,) = attention_table({"rows": rows})
    cells = dict(zip(head, found, strict=True))
    assert cells.pop("head_dim") == "72" and list(cells) == list(LAYOUTS)
    assert (cells["64 x 256"], cells["1 x 784"], cells["1 x 4096"]) == ("10.0 (1.20)", "wrong", "150.0")
    assert cells["1 x 1024"] == "–", "keys that grow are another matter"


def test_schedules_by_layouts() -> None:
    def row(head_dim: int, layout: str, **us: float) -> dict[str, Any]:
        return {"head_dim": head_dim, "layout": layout, "growth": 1.0, "us": us}

    rows = [
        row(72, "1 x 784", fa3=12.04, ships=1.0, late=1234.6),
        row(72, "1 x 64", fa3=2.0),
        row(64, "1 x 784", x=3.0),
    ]
    rows.append(row(72, "1 x 64", fa3=9.0) | {"growth": 200.0})
    head, found = schedules_table({"rows": rows})
    assert head == ["head_dim: schedule", "1 x 784", "1 x 64"]
    assert found == [["72: fa3", "12.0", "2.0"], ["72: late", "1235", "–"], ["64: x", "3.0", "–"]]


def test_sustained_by_layouts() -> None:
    def row(layout: str, **us: float) -> dict[str, Any]:
        sustained = [{"name": name, "us": t, "mhz": 1650.0} for name, t in us.items()]
        return {"head_dim": 72, "layout": layout, "sustained": sustained}

    head, found = sustained_table({"rows": [row("1 x 784", fa3=12.04, late=1234.6), row("1 x 64", fa3=2.0)]})
    assert head[1:] == ["1 x 784", "1 x 64"]
    assert found == [["72: fa3", "12.0 (1650)", "2.0 (1650)"], ["72: late", "1235 (1650)", "–"]]


def test_products_by_columns() -> None:
    def row(left: str, columns: int, clocks: float) -> dict[str, Any]:
        return {"left": left, "columns": columns, "instructions": 16, "clocks": {"1": 1.0, "2": clocks}}

    rows = [row("registers", 64, 1024.0), row("shared memory", 64, 1025.0), row("registers", 8, 432.0)]
    head, found = products_table({"rows": rows})
    assert head[1:] == ["8 columns", "64 columns"]
    assert found == [["registers", "13.5", "32.0"], ["shared memory", "–", "32.0"]]


def test_main_loops_by_tiles() -> None:
    def row(cluster: str, does: str, clocks: float) -> dict[str, Any]:
        return {"tile": "64 x 64", "cluster": cluster, "does": does, "clocks_of_a_step": clocks, "us_of_a_step": 0.1437}

    rows = [row("none", does, clocks) for does, clocks in (("products", 129.6), ("loads", 213.2), ("both", 254.0))]
    rows += [row(cluster, does, 400.0) for cluster in ("weights shared", "x shared") for does in ("loads", "both")]
    head, found = loops_table({"rows": rows})
    assert head == ["a step of K", "64 x 64"]
    assert [line[1] for line in found] == ["130", "213", "254", "0.144", "400", "400", "400"]


def test_meetings_by_size() -> None:
    rows = [
        {"parts": parts, "kib_of_a_cta": 32, "how": how, "median_clocks": 100.0 * parts + i}
        for parts in (2, 3)
        for i, how in enumerate(("fence", "poll", "dsmem"))
    ]
    head, found = meetings_table({"meetings": rows})
    assert head[1:] == ["2 parts, 32 KiB", "3 parts, 32 KiB"]
    assert [line[1:] for line in found] == [["200", "300"], ["201", "301"], ["202", "302"]]


def test_places_by_products() -> None:
    us = {f"{way} {begun}": i + 0.04 for way in PLACES for i, begun in enumerate(("late", "early"), 12)}
    head, found = places_table({"alone": [{"what": what, "us": us} for what in (*ALONE, "another")]})
    assert head[1:] == list(ALONE.values()) and [line[0] for line in found] == list(PLACES.values())
    assert {cell for line in found for cell in line[1:]} == {"12.0, 13.0"}


def test_towers_beside_what_is_planned() -> None:
    us = {"base": 2000.0} | {way: 2000.4 + 10 * i for i, way in enumerate(TOWERS, -1)}
    head, found = later_table({"towers": [{"size": "1 x 448 px", "us": us}]})
    assert head[1:] == ["1 x 448 px"] and [line[1] for line in found] == ["-10", "+0", "+10", "+20", "+30", "+40"]


def test_energy_by_tiles() -> None:
    def row(tile: str, rows: int, **more: Any) -> dict[str, Any]:
        return {"op": "fc1", "rows": rows, "tile": tile, "burst_us": 60.04, "us": 70.0, "millijoules": 50.06} | more

    head, found = energy_table({"rows": [row("a", 4096), row("b", 4096, chosen=True), row("a", 16384)]})
    assert head[1:] == ["a", "b"]
    assert found[0] == ["fc1, 4096 rows", "60.0, 70.0 (50.1)", "**60.0, 70.0 (50.1)**"]
    assert found[1] == ["fc1, 16384 rows", "60.0, 70.0 (50.1)", "–"]


def test_multicast_by_rows() -> None:
    rows = [
        {"op": "fc1", "rows": 4096, "process": process, "tile": "t", "burst_us": us, "us": us, "millijoules": us}
        for process, us in (("shared", 10.0), ("shared", 12.0), ("not", 9.0))
    ]
    head, found = multicast_table({"multicast": rows})
    assert head[1:] == ["fc1, 4096 rows"]
    assert found == [["shared: t", "11.0, 11.0 (11.0)"], ["not: t", "9.0, 9.0 (9.0)"]]


def test_the_best_height_of_each_kernel() -> None:
    def row(backend: str, op: str, tower: str = "T", **us: float) -> dict[str, Any]:
        return {"backend": backend, "tower": tower, "op": op, "rows": 8, "cublas_us": 10.0, "chosen_us": 11.0, "us": us}

    rows = [row("a", "fc1", low=12.0, high=9.8), row("b", "fc1"), row("b", "fc2", x=20.0), row("b", "qkv", "another")]
    head, found = turns_table({"rows": rows})
    assert head[1:] == ["a", "b"]
    assert found == [["fc1, 8 rows", "0.98 (high), 1.10", "–"], ["fc2, 8 rows", "–", "2.00 (x), 1.10"]]
