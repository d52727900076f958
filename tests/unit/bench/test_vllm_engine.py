"""What the whole engine's program says of two engines' documents."""

import math
from typing import Any

import pytest

from fusedvit.bench.engines.vllm_engine import verdict

RIGHT = {name: {"one image": [-1.0, -2.0]} for name in ("first", "second")}


def pair(ours: float = -1.02, fused: int = 3, stages: tuple[str, ...] = ("fresh", "other weights")) -> dict[str, Any]:
    answers = {stage: {"one image": [-1.01, -2.0], "a video": [-1.0, -3.0]} for stage in stages}
    mine = {stage: {"one image": [ours, -2.0], "a video": [-1.0, -3.0]} for stage in stages}
    stats = [{"visual": {"calls": 3, "fused": fused}}]
    return {"vllm": {"log probabilities": answers}, "fusedvit": {"log probabilities": mine, "stats": stats}}


def test_answers_are_kept_as_distances() -> None:
    found = verdict(pair(), RIGHT)
    assert found["holds"] and "log probabilities" not in found["vllm"] | found["fusedvit"]
    assert found["answers"]["fresh"]["one image"] == pytest.approx(
        {"ours - theirs": 0.01, "theirs - right": 0.01, "ours - right": 0.02}
    )
    assert found["answers"]["fresh"]["a video"] == {"ours - theirs": 0.0}, "nobody knows what is right there"


@pytest.mark.parametrize(
    "wrong",
    [pair(ours=-1.1), pair(ours=math.nan), pair(fused=2), pair() | {"fusedvit": {"failed": 1}}, pair(stages=())],
    ids=["far", "NaN", "not all fused", "failed", "no stage"],
)
def test_what_does_not_hold(wrong: dict[str, Any]) -> None:
    assert not verdict(wrong, RIGHT)["holds"]


def test_an_engine_of_vllms_that_failed_compares_with_nothing() -> None:
    assert not verdict(pair() | {"vllm": {"failed": 1}}, RIGHT)["holds"]
