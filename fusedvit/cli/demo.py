"""`fusedvit demo`: real media through the original tower and the fused one, side by side."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusedvit
from fusedvit.bench.timing import gpu_launches, latency, operators, peak_mib
from fusedvit.checkpoint import load_tower
from fusedvit.cli import demo_report, env, kernel_checks
from fusedvit.cli.console import Outcome, Step, new_console, plain, progress, quiet, write_file
from fusedvit.cli.demo_report import SIDES, BadInput, CallResult, Demo, PackedBatch, PackedCall
from fusedvit.cli.media import VisionInput, load_all
from fusedvit.cli.parity import REFERENCE, Towers, outputs_for, parity_of, prepared_for_towers, side_by_side
from fusedvit.cli.towers import Tower, device_of, dtype_of, geometry_of, random_tower
from fusedvit.errors import first_line
from fusedvit.graphs.limits import Limits
from fusedvit.graphs.packing import TOKEN_BUDGET, ItemSize, pack
from fusedvit.pixels.media import Media
from fusedvit.tolerance import summarize

MANY = 100
FREE_BYTES = 16 * 2**30  # of device memory, assumed where there is no GPU
DEADLINE_SECONDS = 60.0  # after which running kernel checks are killed


def run(
    media: Sequence[str | Path] | None, model: str | None = None, plot: Path = Path("demo.png"), json: Any = None
) -> Outcome:
    """Compares both towers, prints the tables and draws the picture."""
    import_module("matplotlib")  # if it is missing, fail before the work
    with quiet(), progress() as step:
        files = load_all(media or [])
        found = collect(files, model, step)
        step("drawing the picture")
        write_file(demo_report.draw(found, files, plot.suffix), plot)
    console = new_console()
    demo_report.show(found, console)
    console.out(f"picture: {plot}" + (f", document: {json}" if json else ""))
    return Outcome({**plain(found), "passed": found.passed}, found.passed)


def collect(media: Sequence[Media], model_id: str | None, step: Step) -> Demo:
    """Compares both towers on `media`: each item alone, and all at once. `step` is called with the next step's name.

    Raises:
        UnsupportedModel: the checkpoint has no tower that can be fused.
        InputError: there is no such checkpoint, or a processor refuses a picture.
    """
    start = time.perf_counter()
    device = device_of(None)
    on_gpu = device.type == "cuda"
    with contextlib.nullcontext() if on_gpu else kernel_checks.started() as finish:
        step("building the tower")
        of = dtype_of(None, device)
        tower = Tower(model_id, load_tower(model_id, device, of, step), of) if model_id else random_tower(device)
        step("fusing")
        handle = fusedvit.fuse(tower.model, fusedvit.FuseConfig(compile="now"))
        towers = side_by_side(handle, tower.dtype, device)
        inputs = prepared_for_towers(media, towers)
        calls = [_compare_call(name, item, towers, step) for name, item in inputs.items()]
        step("bad inputs")
        bad_inputs = _try_bad_inputs(towers.fused, next(iter(inputs.values())).floats(tower.dtype))
        left = DEADLINE_SECONDS - (time.perf_counter() - start)
        kernels = finish(step, left) if finish else []
    return Demo(
        environment=env.collect(),
        tower=tower.name,
        geometry=geometry_of(handle.spec),
        dtype=str(tower.dtype),
        reference_dtype=str(REFERENCE),
        calls=calls,
        spread=summarize(p.comparison for call in calls for p in call.parity),
        bad_inputs=bad_inputs,
        report=handle.report(),
        stats=handle.stats(),
        fused_kernels=None if on_gpu else kernel_checks.kernel_calls(handle),
        kernels=kernels,
        packing=packed_calls(handle, _grids(calls), tower.dtype),
        seconds=time.perf_counter() - start,
    )


def _compare_call(name: str, item: VisionInput, towers: Towers, step: Step) -> CallResult:
    step(f"{name}: parity")
    parity = parity_of(towers, item)
    calls = towers.calls(item)
    on_gpu = towers.device.type == "cuda"
    step(f"{name}: cost")
    patches = int(item.pixel_values.shape[0])
    return CallResult(
        name=name,
        grid_thw=item.grid_thw.tolist(),
        patches=patches,
        tokens=patches // towers.handle.spec.merge_unit,
        parity=parity,
        latency_ms=latency(calls, towers.device) if on_gpu else None,
        launches={side: gpu_launches(calls[side]) for side in SIDES} if on_gpu else None,
        operators=None if on_gpu else operators(calls["original"]),
        peak_mib={side: peak_mib(calls[side], towers.device) for side in SIDES} if on_gpu else None,
    )


# ── the CUDA graphs that a call takes: only the plan, which needs no GPU ──────────────────────────────────────────────


def _grids(calls: Sequence[CallResult]) -> dict[str, list[list[int]]]:
    grids = {call.name: call.grid_thw for call in calls}
    return grids | {f"{MANY} times {calls[-1].name}": MANY * calls[-1].grid_thw}


def packed_calls(handle: Any, grids: Mapping[str, Sequence[Sequence[int]]], dtype: torch.dtype) -> list[PackedCall]:
    """How calls with these rows (t, h, w) would be packed.

    Args:
        handle: the handle of a fused tower. The limits are those of its graphs; without graphs, those for 16 GiB free.
    """
    stats = handle.stats().get("graphs")
    if stats is None:
        limits = handle.prepared.limits(dtype, FREE_BYTES)
    else:
        limits = Limits(*(stats[name] for name in ("token_budgets", "max_items", "max_frames")))
    return [_packed(name, rows, handle.spec, limits) for name, rows in grids.items()]


def _packed(name: str, rows: Sequence[Sequence[int]], spec: Any, limits: Limits) -> PackedCall:
    sizes = tuple(ItemSize(t, h * w // spec.merge_unit) for t, h, w in rows)
    plan = pack(sizes, limits)
    batches = [
        PackedBatch(batch.budget, sum(piece.tokens for piece in batch.pieces), len(batch.pieces))
        for batch in plan.batches
    ]
    return PackedCall(name, len(rows), batches, [TOKEN_BUDGET for _ in plan.overflow])


# ── bad inputs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _try_bad_inputs(fused: nn.Module, item: VisionInput) -> list[BadInput]:
    rows, grid = item.pixel_values, item.grid_thw
    odd = torch.tensor([[1, 3, 4]], device=grid.device)
    cases = {
        "4 patch rows missing": (rows[:-4], grid),
        "a grid of 3 x 4, merged by 2 x 2": (rows[:12], odd),
        "pixels as integers, 0 to 255": (((rows.float() + 1) * 127.5).to(torch.uint8), grid),
    }
    return [_try_bad_input(what, fused, VisionInput(*case)) for what, case in cases.items()]


def _try_bad_input(what: str, fused: nn.Module, item: VisionInput) -> BadInput:
    try:
        outputs_for(fused, item)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:  # the last two count as not refused
        return BadInput(what, type(error).__name__, first_line(error))
    return BadInput(what, "", "accepted")
