"""Captured graphs on a GPU, on four blocks of Qwen3-VL-8B's width. bench/graph_stress.py checks at length."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from fusedvit import FuseConfig, fuse, unfuse
from fusedvit.bench import graph_stress
from fusedvit.bench.graph_stress import DEVICE, FOUR_BLOCKS
from fusedvit.bench.towers import build, pixels_for, verdict_of
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.kernels import fingerprint, launch
from fusedvit.kernels.load_inputs import GRID_DTYPES
from tests.support.graphs_on_cpu import same

pytestmark = pytest.mark.gpu
CONFIG = FuseConfig(token_budgets=(64, 256, 1024), max_items=16, max_frames=64, compile="now")


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    tower, _ = build(FOUR_BLOCKS, torch.bfloat16, DEVICE)
    return tower


@pytest.fixture
def fused(plain: nn.Module) -> Iterator[tuple[nn.Module, FusedEncoder]]:
    handle = fuse(plain, CONFIG)
    with torch.inference_mode():
        handle.warmup()
        yield plain, handle
    unfuse(plain)


def eager_reasons(handle: FusedEncoder) -> dict[str, int]:
    return handle.stats()["eager_runs"]


def test_a_replay_has_the_bits_of_an_eager_run_whatever_the_buffers_held(fused: tuple[nn.Module, FusedEncoder]) -> None:
    found = graph_stress.graph_equals_eager(*fused, batches=60)
    assert found == {"batches": 63, "wrong": 0, "with_nan": 0}
    assert eager_reasons(fused[1]) == {}


def test_layouts_of_one_total_do_not_get_each_others_boundaries(fused: tuple[nn.Module, FusedEncoder]) -> None:
    assert graph_stress.equal_totals(*fused, pairs=100)["wrong"] == 0


def test_held_outputs_never_change(fused: tuple[nn.Module, FusedEncoder]) -> None:
    assert graph_stress.held_outputs(fused[0], 600)["changed"] == 0


def test_threads_and_streams(fused: tuple[nn.Module, FusedEncoder]) -> None:
    assert graph_stress.threads_and_streams(*fused, threads=8, streams=4, calls=40) == {"calls": 320, "wrong": 0}


def test_captures_while_threads_allocate_and_pin(fused: tuple[nn.Module, FusedEncoder]) -> None:
    found = graph_stress.captures_under_load(*fused, captures=10)
    assert found["captures"] == found["right"] == 10 and found["disturbances"] > 0


def test_out_of_memory_leaves_right_answers_and_no_leak(
    fused: tuple[nn.Module, FusedEncoder], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fusedvit"):
        rows = graph_stress.out_of_memory(*fused, [64, 2, 4096])["rows"]
    assert all(row["answer"] in ("right", "refused") and row["afterwards"] == "right" for row in rows)
    assert max(row["leak_mib"] for row in rows) < 1
    assert [row["captured"] for row in rows] == [False, False, True], "64 MiB hold an eager run, not the static buffers"
    assert rows[0]["answer"] == "right"
    assert any("token_budgets" in r.getMessage() and "MiB" in r.getMessage() for r in caplog.records)


def test_nothing_is_compiled_after_warmup(fused: tuple[nn.Module, FusedEncoder]) -> None:
    before = len(launch._compiled)
    graph_stress.graph_equals_eager(*fused, batches=1)  # the eager run may compile its own
    graph_stress.held_outputs(fused[0], 20)
    after = len(launch._compiled)
    graph_stress.held_outputs(fused[0], 60)
    assert len(launch._compiled) == after >= before


def test_the_fingerprint_kernels_are_compiled_with_the_weights(
    fused: tuple[nn.Module, FusedEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, handle = fused
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(fingerprint, "_loaded", {})
    handle.refresh()
    kernel = fingerprint._fingerprint_kernel.fn
    found = [key for key in launch._compiled if key[0] is kernel]
    assert len(found) == len(fingerprint._loaded) == 2, "one of each dtype of a grid; none takes that of 64 bits"
    pixels = pixels_for(tower, [(1, 8, 8)])
    for grid in (torch.tensor([[1, 8, 8]], dtype=dtype, device=d) for dtype in GRID_DTYPES for d in ("cpu", "cuda")):
        graph_stress.call(tower, pixels, grid)
    assert [key for key in launch._compiled if key[0] is kernel] == found and len(fingerprint._loaded) == 2


def test_a_video_over_the_frame_budget_is_split_without_changing_a_bit(plain: nn.Module) -> None:
    grid = [(9, 8, 8)]
    pixels, table = pixels_for(plain, grid), torch.tensor(grid, device="cuda")
    wide = copy.deepcopy(plain).float()
    with torch.inference_mode():
        exact, whole = graph_stress.call(wide, pixels.float(), table), graph_stress.call(plain, pixels, table)
        handle = fuse(plain, FuseConfig(token_budgets=(256,), max_items=3, max_frames=3, compile="now"))
        got = graph_stress.call(plain, pixels, grid)
        frames = [graph_stress.call(plain, pixels[i * 64 : (i + 1) * 64], [(1, 8, 8)]) for i in range(9)]
        stats = handle.stats()
    unfuse(plain)
    assert stats["graphs"]["pieces"] == 3 + 9, "three pieces of three frames, then nine frames alone"
    assert stats["eager_runs"] == {}
    assert all(torch.equal(a, torch.cat(parts)) for a, *parts in zip(got, *frames, strict=True))
    assert verdict_of(got, exact, whole)["passed"], verdict_of(got, exact, whole)


def test_an_image_over_the_largest_budget_runs_eagerly_among_replayed_ones(
    fused: tuple[nn.Module, FusedEncoder],
) -> None:
    tower, handle = fused
    grid = [(1, 8, 8), (1, 80, 80), (1, 6, 10)]
    pixels = pixels_for(tower, grid)
    got = graph_stress.call(tower, pixels, grid)
    assert eager_reasons(handle) == {"token budget": 1}
    first = 0
    for t, h, w in grid:
        alone = graph_stress.call(tower, pixels[first : first + t * h * w], [(t, h, w)])
        part = slice(first // 4, (first + t * h * w) // 4)
        assert torch.equal(got[1][part], alone[1])
        first += t * h * w


def test_weights_that_change_under_captured_graphs(fused: tuple[nn.Module, FusedEncoder]) -> None:
    tower, handle = fused
    grid = [(1, 10, 10)]
    pixels = pixels_for(tower, grid)
    before = graph_stress.call(tower, pixels, grid)
    proj = tower.blocks[1].attn.proj
    saved = proj.weight.data.clone()
    for change in (
        lambda: proj.weight.data.copy_(saved * 1.5),
        lambda: setattr(proj.weight, "data", (saved * 0.5).clone()),
        lambda: setattr(proj, "weight", nn.Parameter((saved * 2).clone(), requires_grad=False)),
    ):
        with torch.inference_mode(False), torch.no_grad():
            change()
        got = graph_stress.call(tower, pixels, grid)
        assert not same(got, before)
        assert same(got, graph_stress.eager(handle, pixels, grid))
    with torch.inference_mode(False), torch.no_grad():
        proj.weight.data.copy_(saved)
    assert same(graph_stress.call(tower, pixels, grid), before)
    assert handle.stats()["graphs"]["captures"] > 3, "moved weights are captured anew"


def test_release_gives_memory_back_and_the_next_call_captures_again(fused: tuple[nn.Module, FusedEncoder]) -> None:
    tower, handle = fused
    grid = [(1, 12, 6)]
    pixels = pixels_for(tower, grid)
    want = graph_stress.call(tower, pixels, grid)
    held = torch.cuda.memory_allocated()
    handle.release()
    assert held - torch.cuda.memory_allocated() > 50 * 2**20
    assert handle.stats()["graphs"]["held_mib"] == 0
    assert same(graph_stress.call(tower, pixels, grid), want)


def test_inside_somebody_elses_capture_it_runs_into_it(
    fused: tuple[nn.Module, FusedEncoder], caplog: pytest.LogCaptureFixture
) -> None:
    tower, handle = fused
    grid = [(1, 8, 12), (2, 4, 4)]
    static = pixels_for(tower, grid)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph_stress.eager(handle, static, grid)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graph_stress.call(tower, static, grid)
    static.copy_(pixels_for(tower, grid, 1))
    graph.replay()
    torch.cuda.synchronize()
    assert eager_reasons(handle) == {"inside another capture": 1}
    assert same(out, graph_stress.eager(handle, static, grid))
    handle.refresh()  # in the same memory
    graph.replay()
    torch.cuda.synchronize()
    assert same(out, graph_stress.eager(handle, static, grid)) and "capture it again" not in caplog.text
    handle.release()
    assert caplog.text.count("capture it again") == 1


def test_two_encoders_side_by_side(plain: nn.Module) -> None:
    other, _ = build(FOUR_BLOCKS.but(depth=2), torch.bfloat16, DEVICE)
    grid = [(1, 8, 8), (3, 4, 6)]
    pixels = pixels_for(plain, grid)
    with torch.inference_mode():
        a, b = fuse(plain, CONFIG), fuse(other, CONFIG)
        for _ in range(3):
            first, second = graph_stress.call(plain, pixels, grid), graph_stress.call(other, pixels, grid)
            assert same(first, graph_stress.eager(a, pixels, grid))
            assert same(second, graph_stress.eager(b, pixels, grid))
    unfuse(plain)
    unfuse(other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_side_by_side(plain: nn.Module) -> None:
    other = copy.deepcopy(plain).to("cuda:1")
    grids = [[(1, 8, 8), (3, 4, 6)], [(1, 20, 24)], [(2, 6, 6)]]
    with torch.inference_mode():
        a, b = fuse(plain, CONFIG), fuse(other, CONFIG)
        for i, grid in enumerate(2 * grids):
            pixels = pixels_for(plain, grid, i)
            first, second = graph_stress.call(plain, pixels, grid), graph_stress.call(other, pixels.to("cuda:1"), grid)
            assert all(t.device.index == 1 for t in second)
            assert same(first, graph_stress.eager(a, pixels, grid))
            assert same(first, [t.to("cuda:0") for t in second]), "two GPUs of one kind give the same bits"
        plain.to("cuda:1")
        assert same(graph_stress.call(plain, pixels.to("cuda:1"), grid), second), "moved, graphs and all"
        plain.to("cuda:0")
        assert same(graph_stress.call(plain, pixels, grid), first)
        assert eager_reasons(a) == eager_reasons(b) == {}
    unfuse(plain)


def test_warmup_compiles_everything(plain: nn.Module) -> None:
    with torch.inference_mode():
        handle = fuse(plain, CONFIG)
        handle.warmup()
        before = handle.stats()["compiles"]
        for i, grid in enumerate([[(1, 4, 4)], [(1, 30, 30)], [(7, 8, 8), (1, 20, 6)], [(1, 60, 60)]]):
            graph_stress.call(plain, pixels_for(plain, grid, i), grid)
        assert handle.stats()["compiles"] == before > 0
    unfuse(plain)


def test_a_capture_launches_nothing_for_the_first_time(plain: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsal leaves out would be loaded onto the GPU within the capture, which CUDA may refuse."""
    first: list[bool] = []
    really = launch._first_launch

    def note(*given: Any) -> Any:
        first.append(torch.cuda.is_current_stream_capturing())
        return really(*given)

    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_first_launch", note)
    handle = fuse(plain, CONFIG)
    try:
        handle.warmup()
        graphs = handle.stats()["graphs"]
        assert graphs["captures"] == len(graphs["token_budgets"])
    finally:
        unfuse(plain)
    assert first and not any(first)
