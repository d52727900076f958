"""Attention for Hopper without a GPU: which configuration a budget takes, and what compiles for sm_90."""

import dataclasses
import types
from typing import Any

import pytest
import torch

from fusedvit.aot import QWEN3_VL_8B
from fusedvit.kernels import forms
from fusedvit.kernels.attention import split_head
from fusedvit.kernels.configs import Target, budget
from fusedvit.kernels.forms import Key
from fusedvit.kernels.hopper import attention as hopper_attention
from fusedvit.kernels.hopper import attention_parts, compat, configs
from fusedvit.kernels.hopper.configs import (
    HopperAttentionConfig,
    hopper_attention_candidates,
    hopper_attention_config,
    wrong_hopper_attention,
)
from fusedvit.kernels.tables import Table
from fusedvit.plan import plan_for
from fusedvit.report import choices
from tests.kernels.attention_cases import segments
from tests.kernels.test_aot import run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200, A100, B200 = Target(), Target(80, 108, 163 * 1024), Target(100, 148)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without the interpreter."""
    monkeypatch.setattr(compat, "usable", lambda capability: capability == 90)


def test_the_interpreter_runs_no_gluon() -> None:
    if not torch.cuda.is_available():
        assert hopper_attention_config(1024, 16, 72, BF16, H200) is None


@pytest.mark.parametrize(
    "head_dim, dtype, target, why",
    [
        (72, FP32, H200, "bfloat16 and float16 only"),
        (72, BF16, A100, "not sm_80"),
        (72, BF16, B200, "not sm_100"),
        (96, BF16, H200, ""),  # never timed, as 128
        (128, BF16, H200, ""),
    ],
)
def test_where_there_is_no_answer(usable: None, head_dim: int, dtype: torch.dtype, target: Target, why: str) -> None:
    assert hopper_attention_config(1024, 16, head_dim, dtype, target) is None
    assert why in configs.absent(target, dtype)


@pytest.mark.parametrize("head_dim", configs.MEASURED)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("newer", [False, True])
def test_every_budget_has_an_answer_that_can_run(
    usable: None, monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype, newer: bool
) -> None:
    monkeypatch.setattr(compat, "NEEDS_MORE_REGISTERS", newer)
    chosen = {hopper_attention_config(budget(rows), 16, head_dim, dtype, H200) for rows in range(1, 70000, 61)}
    assert None not in chosen
    assert {c.block_m for c in chosen if c} == {64, 128, 192}
    assert {c.block_n for c in chosen if c} == ({64} if newer and head_dim > 64 else {64, 128})
    for config in chosen:
        assert config and wrong_hopper_attention(config, H200, dtype) == ""
        assert configs.shared_bytes(config, *split_head(head_dim)) <= H200.max_shared


def test_wrong_configurations_say_why(usable: None) -> None:
    good = HopperAttentionConfig(2, 128, 3, ping_pong=True)
    wrong = {
        "consumers must be": dataclasses.replace(good, consumers=4),
        "block_n 64 or 128": dataclasses.replace(good, block_n=96),
        "out of range": dataclasses.replace(good, stages=1),
        "bytes of shared memory": dataclasses.replace(good, stages=9),
        "nobody to take turns": dataclasses.replace(good, consumers=1),
    }
    for said, config in wrong.items():
        assert said in wrong_hopper_attention(config, H200, BF16)
    assert "not sm_80" in wrong_hopper_attention(good, A100, BF16)
    for head_dim in (64, 72, 80, 128):
        candidates = hopper_attention_candidates(head_dim, BF16, H200)
        assert len(set(candidates)) == len(candidates) >= 2
        assert not any(wrong_hopper_attention(c, H200, BF16) for c in candidates)
    assert good in hopper_attention_candidates(72, BF16, H200)


@pytest.mark.parametrize(
    "error, said, change",
    [
        (TypeError, "got torch.float32 and torch.float32", {"dtype": FP32}),
        (TypeError, "got torch.bfloat16 and torch.float16", {"out": torch.empty(64, 144, dtype=FP16)}),
        (ValueError, "multiple of 8 from 16 to 128, got 36", {"head_dim": 36, "heads": 4}),
        (
            ValueError,
            r"\[T, 144\] for 2 heads of 72, got \(64, 432\) and \(64, 72\)",
            {"out_columns": 72},
        ),
        (ValueError, r"contiguous, got strides \(433, 1\)", {"pitch": 433}),
        (ValueError, "multiple of 16 bytes, got address", {"offset": 1}),
        (ValueError, "tiles must be of 128 queries as the config's, got 64", {"block_m": 64}),
    ],
)
def test_bad_input_is_named_before_any_launch(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], said: str, change: dict[str, Any]
) -> None:
    given = {"dtype": BF16, "heads": 2, "head_dim": 72, "out_columns": 144, "pitch": 432, "offset": 0, "block_m": 128}
    given |= change
    dtype, pitch, offset = given["dtype"], given["pitch"], given["offset"]
    qkv = torch.empty(64 * pitch + offset, dtype=dtype)[offset:].view(64, pitch)[:, :432]
    out = given.get("out", torch.empty(64, given["out_columns"], dtype=dtype))
    segs = segments([64], given["block_m"], torch.device("cpu"))
    monkeypatch.setattr(hopper_attention, "launch", lambda *arguments: pytest.fail("launched"))
    with pytest.raises(error, match=said):
        hopper_attention.attention(qkv, segs, out, given["heads"], given["head_dim"], configs.SHORT)


def test_reports_say_what_attention_does_without(usable: None) -> None:
    """Elsewhere, and where it failed, plain Triton takes its place."""
    assert plan_for(QWEN3_VL_8B, 1024, BF16, H200, Table()).choices()["attention"] == "hopper"
    for dtype, target, why in (
        (FP32, H200, "bfloat16 and float16 only"),
        (BF16, A100, "Hopper only, not sm_80 or the interpreter"),
        (BF16, dataclasses.replace(H200, without=(("attention/hopper", "ptxas died"),)), "ptxas died"),
    ):
        assert plan_for(QWEN3_VL_8B, 1024, dtype, target, Table()).choices()["attention"] == "triton"
        assert f"  without attention in its hopper form: {why}" in choices(QWEN3_VL_8B, dtype, target, [1024])


@pytest.mark.parametrize("heads, together", [(16, 16), (16, 4), (16, 1), (12, 4), (6, 3)])
def test_work_is_every_tile_and_head_once(monkeypatch: pytest.MonkeyPatch, heads: int, together: int) -> None:
    """The kernel's own walk, run as Python; the next heads' tiles come after all of these."""
    sizes = types.SimpleNamespace(HEADS=heads, TOGETHER=together)
    tiles = [(10 * n, 10 * n + 9, 10 * n + 3) for n in range(7)]
    flat = [number for tile in tiles for number in (*tile, 0)]
    stand_in = types.SimpleNamespace(
        static_range=range, where=lambda yes, a, b: a if yes else b, load=lambda pointer: flat[pointer]
    )
    monkeypatch.setattr(attention_parts, "gl", stand_in)
    for count in range(1, 8):
        items = [attention_parts.work_item.fn(i, 0, count, sizes) for i in range(count * heads)]
        assert sorted(items) == sorted((*tile, head) for tile in tiles[:count] for head in range(heads))
        assert [item[3] // together for item in items] == sorted(item[3] // together for item in items)
        assert {item[3] for item in items[:together]} == set(range(together))


def test_windows_take_tiles_of_their_size(usable: None) -> None:
    form = forms.named(forms.ATTENTION, "hopper")
    assert form is not None
    key = Key(forms.ATTENTION, "window", 16, 80, 4096, "bfloat16")
    assert form.heuristic(key, BF16, H200, 256).block_m == 64
    assert form.heuristic(dataclasses.replace(key, kind=""), BF16, H200, 256).block_m == 128


@pytest.mark.parametrize("tower, tokens", [("hd80", "16384")])  # the others: make aot
def test_what_ships_compiles_clean(tower: str, tokens: str) -> None:
    """Registers, spills, C75xx, wgmma, the order of exponentials and waits; all of them: make aot-matrix."""
    code = f"""
import torch
from fusedvit.aot import SMS, TOWERS, compile_or_fail, launches_of
from fusedvit.kernels.configs import Target
launches = launches_of(*TOWERS["{tower}"], torch.bfloat16, {tokens}, Target())
launches = [launch for launch in launches if "hopper_attention" in launch.name]
assert len(launches) == 1, launches
found = compile_or_fail(launches[0], 90)
assert not found.problems and found.registers >= 128 and "BLOCK_N" in found.launch, found
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
