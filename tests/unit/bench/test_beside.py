"""The measurement of mergers beside the blocks, on the CPU: its ways, its verdict on bits, its document."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusedvit.bench import beside
from fusedvit.graphs.side_stream import NoSideStream
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import plan_for
from fusedvit.runtime.ahead_of_time import QWEN3_VL_8B


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
def test_it_measures_each_way(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "beside.json"
    ways = ["in line", "planned", "24 SMs", "all SMs, equal", "last paired"]
    words = [
        "beside",
        "--json",
        str(path),
        "--size",
        "512 patches",
        "--seconds",
        "0",
        "--way",
        *ways,
        "--commit",
        "abc",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert beside.main() == 0
    document = json.loads(path.read_text())
    rows, ran = document["rows"], document["passport"]
    assert ran["commit"] == "abc" and ran["command"] == (
        "python -m fusedvit.bench.beside --json beside.json --size '512 patches' --seconds 0 "
        "--way 'in line' planned '24 SMs' 'all SMs, equal' 'last paired'"
    )
    assert [row["way"] for row in rows] == ways and all(row["wrong"] == 0 for row in rows)
    assert rows[0]["beside"] is None and rows[2]["beside"]["mergers"] == [0, 1, 2]
    assert rows[3]["beside"]["chain"] == [] and rows[3]["paired"] is None
    said = capsys.readouterr().out.splitlines()
    assert json.loads(said[-1])["wrong"] == 0
    assert rows[4]["beside"] is None and rows[4]["paired"]["merger"] == 2
    assert "3 on 24  " in said[2] and "2 with the last" in said[4]


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
@pytest.mark.parametrize("rows", [896, 1408])
def test_ways_differ_in_what_their_names_say(on_cpu: None, rows: int) -> None:
    target = Target(name="NVIDIA H200")
    usual = plan_for(QWEN3_VL_8B, rows, beside.DTYPE, target)
    plans = {name: way.plan(QWEN3_VL_8B, rows, beside.DTYPE, target) for name, way in beside.WAYS.items()}
    assert usual.paired is not None and plans["planned"] == usual
    assert plans["planned, last in line"] == replace(usual, paired=None)
    assert plans["last paired"] == replace(usual, beside=None)
    assert plans["in line"] == replace(usual, beside=None, paired=None)


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
def test_blocks_begin_as_a_ways_name_says(on_cpu: None) -> None:
    """All else as planned, beside mergers too."""
    target = Target(name="NVIDIA H200")
    usual = plan_for(QWEN3_VL_8B, 768, beside.DTYPE, target)
    assert usual.beside is not None and usual.beside.chain and not usual.fc2.pdl and usual.qkv.pdl
    for name, way in beside.BEGUN.items():
        plan = way.plan(QWEN3_VL_8B, 768, beside.DTYPE, target)
        for launches, planned in ((plan, usual), (plan.narrowed(), usual.narrowed())):
            begun = {op: getattr(launches, op).pdl for op in beside.BLOCK}
            expected = {op: getattr(planned, op).pdl for op in beside.BLOCK}
            expected |= dict.fromkeys(way.early, True) | dict.fromkeys(way.late, False)
            assert begun == expected, name
        assert beside.BEGUN["qkv late"].late == ("qkv",) and plan.merger_fc1 == usual.merger_fc1


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
def test_it_sees_a_merger_that_has_not_run(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(NoSideStream):
        calls = 0

        def fork(self, launches) -> None:
            Forgetful.calls += 1
            if Forgetful.calls != 7:  # the rehearsal's and the capture's three each, then the first replay's
                launches()

    monkeypatch.setattr(beside, "CapturedSideStream", lambda device, priority: Forgetful())
    line = beside.Line(*beside.tower_of("Qwen3-VL-8B"), beside.WAYS["24 SMs"], beside.GRIDS["1 x 224 px"])
    assert line.wrong(line.capture()) == 1
