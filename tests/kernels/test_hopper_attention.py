"""Attention for Hopper without a GPU: which configuration a budget takes, and what compiles for sm_90."""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusedvit.bench.ops import attention_task
from fusedvit.kernels import backends
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper import attention as hopper_attention
from fusedvit.kernels.hopper import attention_configs, attention_smem, gluon_compat
from fusedvit.kernels.hopper.attention_configs import (
    SHORT_FRAME,
    HopperAttentionConfig,
    contents,
    hopper_attention_candidates,
    hopper_attention_config,
    hopper_attention_proposals,
    microseconds,
    two_lists,
    wrong_hopper_attention,
)
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.plan import plan_for
from fusedvit.stats import choices
from tests.kernels.attention_cases import segments
from tests.kernels.attention_times import TIMES, WIDE_TIMES
from tests.kernels.test_aot import run
from tests.support.specs import QWEN3_VL_8B

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200, A100, B200 = Target(), Target(80, 108, 163 * 1024), Target(100, 148)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without the interpreter."""
    monkeypatch.setattr(gluon_compat, "usable", lambda capability: capability == 90)


def test_the_interpreter_runs_no_gluon() -> None:
    if not torch.cuda.is_available():
        assert hopper_attention_config(1024, 16, 72, BF16, H200) is None


@pytest.mark.parametrize(
    "head_dim, dtype, target, why",
    [
        (72, FP32, H200, "bfloat16 and float16 only"),
        (72, BF16, A100, "not sm_80"),
        (72, BF16, B200, "not sm_100"),
        (96, BF16, H200, ""),  # never timed
    ],
)
def test_where_there_is_no_answer(usable: None, head_dim: int, dtype: torch.dtype, target: Target, why: str) -> None:
    assert hopper_attention_config(1024, 16, head_dim, dtype, target) is None
    assert why in gluon_compat.absent(target.capability, dtype)


@pytest.mark.parametrize("head_dim", attention_configs.MEASURED)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_budget_has_an_answer_that_can_run(usable: None, head_dim: int, dtype: torch.dtype) -> None:
    budgets = {budget(rows) for rows in range(1, 70000, 61)}
    kinds = [("", rows) for rows in budgets if not two_lists(rows, head_dim)]
    kinds += [(kind, rows) for rows in budgets if two_lists(rows, head_dim) for kind in ("short", "long")]
    chosen = {hopper_attention_config(rows, 16, head_dim, dtype, H200, kind) for kind, rows in kinds}
    assert None not in chosen
    assert {c.block_m for c in chosen if c} == ({64, 128} if head_dim == 128 else {64, 128, 192})
    for config in chosen:
        assert config and wrong_hopper_attention(config, H200, dtype) == ""
        assert attention_configs.shared_bytes(config, head_dim) <= H200.max_shared


def test_wrong_configurations_say_why(usable: None) -> None:
    good = dataclasses.replace(attention_configs.SHORT, pdl=True)
    wrong = {
        "consumers must be": dataclasses.replace(good, consumers=4),
        "stages must be at least 2": dataclasses.replace(good, stages=1),
        "together not negative": dataclasses.replace(good, together=-1),
        "bytes of shared memory": dataclasses.replace(good, stages=16),
        "ping_pong needs at least 2 consumers": dataclasses.replace(good, consumers=1),
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
        hopper_attention.attention(qkv, segs, out, given["heads"], given["head_dim"], attention_configs.SHORT)


def test_reports_say_what_attention_does_without(usable: None) -> None:
    """Elsewhere, and where it failed, plain Triton takes its place."""
    assert plan_for(QWEN3_VL_8B, 1024, BF16, H200, Table()).choices()["attention"] == "hopper"
    for dtype, target, why in (
        (FP32, H200, "bfloat16 and float16 only"),
        (BF16, A100, "Hopper only, not sm_80 or the interpreter"),
        (BF16, dataclasses.replace(H200, without=(("attention/hopper", "ptxas died"),)), "ptxas died"),
    ):
        assert plan_for(QWEN3_VL_8B, 1024, dtype, target, Table()).choices()["attention"] == "triton"
        assert f"  without attention in its hopper backend: {why}" in choices(QWEN3_VL_8B, dtype, target, [1024])


@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_barriers_are_within_one_line_of_the_array(head_dim: int, consumers: int) -> None:
    for stages in range(2, 11):
        at = attention_configs.smem_layout(head_dim, consumers, stages, by_warp=True)
        last = attention_smem._first_barrier.fn("order", stages) + consumers
        assert at.barriers % attention_configs.MAX_BARRIERS == 0 and last <= attention_configs.MAX_BARRIERS
        assert 8 * (at.barriers + last) <= at.units * attention_configs.UNIT


@pytest.mark.parametrize("heads, together", [(16, 16), (16, 4), (16, 1), (12, 4), (6, 3)])
def test_work_is_every_tile_and_head_once(monkeypatch: pytest.MonkeyPatch, heads: int, together: int) -> None:
    """The kernel's own walk, run as Python; the tiles of the next heads come after all of these."""
    sizes = types.SimpleNamespace(HEADS=heads, TOGETHER=together)
    tiles = [(10 * n, 10 * n + 9, 10 * n + 3) for n in range(7)]
    flat = [number for tile in tiles for number in (*tile, 0)]
    on_python = types.SimpleNamespace(
        static_range=range,
        where=lambda yes, a, b: a if yes else b,
        load=lambda pointer, mask, other: flat[pointer] if mask else other,
    )
    monkeypatch.setattr(attention_smem, "gl", on_python)
    monkeypatch.setattr(attention_smem, "tile_and_head", attention_smem.tile_and_head.fn)
    for count in range(1, 8):
        items = [attention_smem.work_item.fn(i, 0, count, sizes) for i in range(count * heads)]
        assert sorted(items) == sorted((*tile, head) for tile in tiles[:count] for head in range(heads))
        assert [item[3] // together for item in items] == sorted(item[3] // together for item in items)
        assert {item[3] for item in items[:together]} == set(range(together))
        known = [attention_smem.work_item.fn(i, 0, count, sizes, False, 1, 2, 3) for i in range(count * heads)]
        assert known == [(1, 2, 3, item[3]) for item in items], "a tile that is known is not loaded"


def test_heads_are_walked_a_few_at_a_time_where_keys_and_values_exceed_l2(usable: None) -> None:
    for rows, kind, together in ((8192, "", 0), (16384, "long", 4), (16384, "short", 0), (65536, "long", 4)):
        chosen = hopper_attention_config(rows, 16, 72, BF16, H200, kind)
        assert chosen is not None and chosen.together == together
        assert {c.together for c in hopper_attention_proposals(rows, 16, 72, BF16, H200, kind)} == {together}
        for heads, walked in ((16, together or 16), (6, 6)):  # 4 heads at a time do not divide 6
            assert chosen.constants(heads, 72)["TOGETHER"] == walked


def timings() -> Iterator[tuple[int, int, int, dict[HopperAttentionConfig, float]]]:
    """(head_dim, frames, tokens of each, microseconds of each schedule that has a cost)."""
    for head_dim, frames, length, *us in (*TIMES, *WIDE_TIMES):
        schedules = attention_configs.schedules(head_dim)
        yield head_dim, frames, length, {c: t for c, t in zip(schedules, us, strict=True) if t is not None}


def test_costs_are_what_was_timed(usable: None) -> None:
    errors = []
    for head_dim, frames, length, us in timings():
        for config, timed in us.items():
            if length >= 196 or config == attention_configs.TINY:  # nothing else is asked for windows
                errors.append(microseconds(config, frames, length, 16, head_dim, 132) / timed - 1)
    assert len(errors) > 90
    assert max(map(abs, errors)) < 0.12
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.04


def test_what_is_chosen_is_near_the_best_that_was_timed(usable: None) -> None:
    """In every layout that was timed, though a budget's other contents are weighed with it."""
    seen = 0
    for head_dim, frames, length, us in timings():
        rows = budget(frames * length)
        kind = "window" if length == 64 else ""
        if two_lists(rows, head_dim) and not kind:
            kind = "short" if length <= SHORT_FRAME else "long"
        chosen = hopper_attention_config(rows, 16, head_dim, BF16, H200, kind)
        assert chosen is not None
        chosen = dataclasses.replace(chosen, max_programs=132, pdl=False)
        if chosen in us:
            assert us[chosen] <= 1.1 * min(us.values()), f"{head_dim}: {frames} x {length}: {chosen}, {us}"
            seen += 1
    assert seen > 20


def test_one_wave_is_better_than_two(usable: None) -> None:
    """1296 tokens are 176 tiles of 128 queries and heads, 112 of 192: an H200 has 132 SMs."""
    for head_dim in (64, 72, 80):  # heads of 128 have no tiles of 192
        for rows in (1280, 1536):
            assert hopper_attention_config(rows, 16, head_dim, BF16, H200).block_m == 192
        assert hopper_attention_config(1024, 16, head_dim, BF16, H200).block_m == 128


@pytest.mark.parametrize("rows", [64, 896, 1024, 6144, 16384])
def test_contents_nearly_fill_their_budget(rows: int) -> None:
    everything = contents(rows, "")
    assert (1, rows) in everything
    assert all(0.8 * rows < frames * length <= rows for frames, length in everything) and len(everything) > (rows > 64)
    assert contents(rows, "short") + contents(rows, "long") == sorted(everything, key=lambda c: c[1] > SHORT_FRAME)
    assert contents(rows, "window") == [(rows // 64, 64)]


def test_windows_take_tiles_of_their_size(usable: None) -> None:
    backend = backends.backend_named(backends.ATTENTION, "hopper")
    assert backend is not None
    key = Key(backends.ATTENTION, "window", 16, 80, 4096, "bfloat16")
    assert backend.heuristic(key, BF16, H200, 256).block_m == 64
    assert backend.heuristic(dataclasses.replace(key, kind=""), BF16, H200, 256).block_m == 128


def test_large_budgets_have_two_lists(usable: None) -> None:
    """Where the two schedules differ; plain Triton has one for both."""
    few, many = (plan_for(QWEN3_VL_8B, rows, BF16, H200, Table()) for rows in (8192, 16384))
    assert few.short_attention is None and few.layout(QWEN3_VL_8B).short == 0
    layout = many.layout(QWEN3_VL_8B)
    assert (layout.block_m, layout.short, layout.short_block_m) == (192, SHORT_FRAME, 128)
    assert many.choices()["short_attention"] == "hopper"
    plain = plan_for(QWEN3_VL_8B, 16384, BF16, A100, Table())
    assert plain.short_attention is None and plain.layout(QWEN3_VL_8B).short == 0
    named = [attention_task(QWEN3_VL_8B, 16384, BF16, length).key.kind for length in (256, 4096, 4097)]
    assert named == ["short", "short", "long"]
    assert attention_task(QWEN3_VL_8B, 8192, BF16, 256).key.kind == ""


def test_what_ships_compiles_clean() -> None:
    """Registers, spills, C75xx, wgmma, the order of exponentials and waits; of the other towers: make aot."""
    code = """
from fusedvit.bench.ahead_of_time import TARGETS, compile_or_fail, launches_of
jobs = launches_of("Qwen3-VL-8B", "bf16", (16384,), TARGETS[90]).values()
jobs = [job for job in jobs if "hopper_attention" in job.name]
assert len(jobs) == 2, jobs
for found in (compile_or_fail(job, 90) for job in jobs):
    assert not found.problems and found.registers >= 128 and "CONSUMERS" in found.launch, found
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_role_waits_for_the_previous_launch() -> None:
    """Each consumer and the producer, once, whether a CTA has work or not; the next launch may begin at once. Before it
    waits a role reads the count of tiles and its first one, three numbers, and nothing else: no q, k or v."""
    code = """
import dataclasses
import torch
from fusedvit.kernels import codegen_checks
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.hopper import attention, attention_configs
from fusedvit.kernels.launch import record
config = dataclasses.replace(attention_configs.SHORT, pdl=True)
integers = lambda *shape: torch.empty(shape, dtype=torch.int32, device="meta")
segments = Segments(integers(9), integers(64, 4), integers(1), config.block_m)
qkv, out = (torch.empty(64, n * 128, dtype=torch.bfloat16, device="meta") for n in (3, 1))
(job,) = record(lambda: attention.attention(qkv, segments, out, 2, 64, config)).values()
assert "launch_pdl" not in job.options  # it decides no code: set when the kernel is launched
assert not codegen_checks.compile_job(job, 90).problems
ptx = codegen_checks.build(job, 90).asm["ptx"]
assert ptx.count("griddepcontrol.wait") == config.consumers + 1
assert ptx.count("griddepcontrol.launch_dependents") == 1
for role in ptx.split("griddepcontrol.wait")[:-1]:
    before = role.rpartition("griddepcontrol.launch_dependents")[2].rpartition("barrier.sync")[2]
    assert before.count("ld.global.b32") == before.count("ld.global") == 4, before
    assert "cp.async" not in before and "st.global" not in before, before
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


SPARE = """
import torch
from fusedvit.kernels.codegen_checks import _misplaced_operands, compile_job
from fusedvit.kernels.launch import record
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.hopper import attention
from fusedvit.kernels.hopper.attention_configs import schedules
from fusedvit.kernels.hopper.attention_configs import shared_bytes

integers = lambda *shape: torch.empty(shape, dtype=torch.int32, device="meta")
for head_dim, config in ((head_dim, config) for head_dim in (64, 72, 80) for config in schedules(head_dim)):
    dtype = torch.float16 if config.consumers == 1 else torch.bfloat16
    segments = Segments(integers(9), integers(64, 4), integers(1), config.block_m)
    qkv, out = (torch.empty(64, 2 * n * head_dim, dtype=dtype, device="meta") for n in (3, 1))
    (job,) = record(lambda: attention.attention(qkv, segments, out, 2, head_dim, config)).values()
    found = compile_job(job, 90)
    assert config.spare(head_dim) == (head_dim == 72) and config.summed(head_dim) == (head_dim != 72)
    assert found.problems == () and found.shared_bytes <= shared_bytes(config, head_dim), found
    behind = "mov.b32 %r2, global_smem; add.s32 %r1, %r2, 999999; mbarrier.init.shared::cta.b64 [%r1], 1;"
    assert not _misplaced_operands(job, behind)
    assert "something lies at" in _misplaced_operands(job, "st.shared.b32 [global_smem], %r1;")[0]
    assert _misplaced_operands(job, "st.shared.b32 [global_smem+999999], %r1;"), "no barrier was seen"
"""


def test_what_is_found_by_address_lies_where_shared_memory_begins() -> None:
    """And no spill, nor a product that waits for another. Where something else lies there, it is told."""
    done = run("-c", SPARE)
    assert done.returncode == 0, done.stderr[-2000:]
