"""What the benchmark of the first call makes of its scenarios; the scenarios themselves need a GPU."""

from typing import Any

from fusedvit.bench.first_call import BARS, SIDES, judged, problems

MEDIANS = {
    "first_s": 1.6,
    "first_of_size_s": {str(side): 0.06 for side in SIDES},
    "median_s": {str(side): 0.03 for side in SIDES},
}


def call(side: int, s: float, end_s: float, fused: bool) -> dict[str, Any]:
    return {"side": side, "s": s, "end_s": end_s, "fused": fused}


def scenarios() -> dict[str, Any]:
    """A run that meets every bar."""
    calls = [call(SIDES[0], 2.0, 2.0, False)]
    calls += [call(side, 0.03, 2.1 + i / 100, False) for i, side in enumerate(SIDES)]
    calls += [call(side, 0.002, 7.0 + i, True) for i, side in enumerate(SIDES)]
    slow = [call(448, 2.0, 2.0, False), call(448, 0.05, 3.0, False), call(448, 0.04, 21.0, True)]
    warm_up = {"s": 3.0, "error": 0.001, "compiled_elsewhere": 0}
    return {
        "hugging_face": MEDIANS,
        "loop": {"calls": calls, "errors": {448: 0.001}},
        "loop_warm": {"calls": [*calls[:2], call(224, 0.06, 3.0, False)], "errors": {448: 0.001}},
        "warmup_cold": warm_up | {"s": 20.0, "compiled_elsewhere": 90},
        "warmup_warm": warm_up,
        "warmup_folder": warm_up,
        "hugging_face_two_cores": MEDIANS,
        "two_cores": {"calls": slow, "errors": {}},
    }


def test_every_bar_is_judged() -> None:
    figures = judged(scenarios())
    assert figures.keys() == BARS.keys() and problems(scenarios()) == []
    assert figures["first_of_hf"] == 1.25 and figures["slowest_of_hf"] == 1.0
    assert figures["warm_slowest_of_hf"] == 2.0 and figures["new_size_of_hf"] == 0.5
    assert figures["first_fused_s"] == 5.0 and figures["all_fused_s"] == 16.0
    assert round(figures["two_cores_of_hf"], 2) == 1.67 and figures["two_cores_fused_s"] == 19.0


def test_what_is_missed_is_said() -> None:
    found = scenarios()
    found["loop"]["calls"].insert(5, call(224, 0.5, 3.0, False))
    found["loop"]["errors"][224] = float("nan")
    found["warmup_warm"] = {"failed": "exit status 1"}
    found["warmup_folder"]["compiled_elsewhere"] = 3
    assert [line.split(" ")[0] for line in problems(found)] == [
        "warmup_warm:",
        "loop:",
        "slowest_of_hf",
        "new_size_of_hf",
        "folder_compiles",
    ]


def test_a_size_that_never_ran_fused_is_not_counted_as_fused() -> None:
    found = scenarios()
    found["loop"]["calls"] = [c for c in found["loop"]["calls"] if not (c["fused"] and c["side"] == 1344)]
    assert "all_fused_s" not in judged(found) and problems(found) == ["all_fused_s: never"]
